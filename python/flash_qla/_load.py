"""Loads the compiled op library.

Importing must never fail (other packages find this one by its name alone), so an error is kept here and shown by the first call.
"""

import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent
# In a folder of its own: beside the modules, tools that walk the package would take it for one.
_LIBRARY = _PACKAGE / "lib" / "libflashqla_torch.so"
OLDEST_TORCH = (2, 10)


def _read_version() -> str:
    """The file VERSION: installed beside this file, or at the root of a source checkout."""
    for path in (_PACKAGE / "VERSION", _PACKAGE.parents[1] / "VERSION"):
        if path.is_file():
            return path.read_text().strip()
    return "unknown"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])  # "3.0rc1" and "2.12" are versions, too


def _load() -> Exception | None:
    try:
        if _torch_version() < OLDEST_TORCH:
            return ImportError(f"torch {torch.__version__} is too old: 2.10 or newer is needed")
        if not _LIBRARY.is_file():
            return ImportError(f"{_LIBRARY} does not exist: build it with `make`, or install the package with `pip install .`")
        torch.ops.load_library(str(_LIBRARY))
        built = torch.ops.flashqla.version()
        if built != __version__:
            return ImportError(f"{_LIBRARY} was built from version {built}, this package is {__version__}: build it again")
    except Exception as error:
        return error
    return None


__version__ = _read_version()
load_error = _load()

_NAMES = (
    "chunk_forward",
    "chunk_forward_training",
    "chunk_forward_low_level",
    "chunk_forward_pool",
    "chunk_backward",
    "recurrent_forward",
    "recurrent_forward_pool",
)
_EXPLAINED = tuple(name for name in _NAMES if name != "chunk_forward_training")

# The overloads by name; empty without the library.
OPS = {}
if load_error is None:
    _EXPLANATIONS = (*(f"explain_{name}" for name in _EXPLAINED), "explain_saved_elements")
    OPS = {name: getattr(torch.ops.flashqla, name).default for name in (*_NAMES, *_EXPLANATIONS)}


def not_loaded() -> RuntimeError:
    """What a call without the library raises."""
    error = RuntimeError(f"flash_qla {__version__}: the compiled library could not be loaded. First error: {load_error}")
    error.__cause__ = load_error
    return error
