"""Loads the compiled op libraries: one with the schemas and the kernels for the CPU and, beside a torch for CUDA, one for CUDA.

Importing must never fail (other packages find this one by its name alone), so an error is kept here and shown by the first call.
Loading starts nothing: CUDA is looked at by the first call on one of its devices, so a process may still fork after the import.
"""

import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent
# In a folder of its own: beside the modules, tools that walk the package would take it for one.
_LIBRARY = _PACKAGE / "lib" / "libflashqla_torch.so"
_CUDA_LIBRARY = _PACKAGE / "lib" / "libflashqla_torch_cuda.so"
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
            return ImportError(
                f"{_LIBRARY} does not exist: build it with `make build`, or install the package with `pip install .`"
            )
        torch.ops.load_library(str(_LIBRARY))
        _expect_version(_LIBRARY, torch.ops.flashqla.version())
    except Exception as error:
        return error
    return None


def _expect_version(library: Path, built: str) -> None:
    if built != __version__:
        raise ImportError(f"{library} was built from version {built}, this package is {__version__}: build it again")


def _load_cuda() -> str | None:
    """Why there are no kernels for CUDA devices, None if there are. Whether there is a device is for a call to find out."""
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    if not _CUDA_LIBRARY.is_file():
        return (
            f"{_CUDA_LIBRARY} does not exist: build it with `make build`, or install the package with "
            "`FLASHQLA_CUDA=1 pip install .`, on a machine that has nvcc 12.8 or newer"
        )
    try:
        torch.ops.load_library(str(_CUDA_LIBRARY))
        _expect_version(_CUDA_LIBRARY, torch.ops.flashqla.version_for_cuda())
    except Exception as error:
        return f"{_CUDA_LIBRARY} could not be loaded: {error}"
    return None


__version__ = _read_version()
load_error = _load()
cuda_load_error = _load_cuda() if load_error is None else str(load_error)

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
    OPS |= {f"{name}.cuda": getattr(torch.ops.flashqla, name).cuda for name in _EXPLANATIONS}


def not_loaded() -> RuntimeError:
    """What a call without the library raises."""
    error = RuntimeError(f"flash_qla {__version__}: the compiled library could not be loaded. First error: {load_error}")
    error.__cause__ = load_error
    return error
