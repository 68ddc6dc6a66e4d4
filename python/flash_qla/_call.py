"""Calls an op and gives its errors the Python type they were thrown for.

The checks live in the C++ library and nowhere else. The stable ABI turns every C++ exception into a RuntimeError, so the op library marks the
message with the type (bindings/torch/ops_cpu.cpp).
"""

import os
import re
import warnings

import torch

from ._load import OPS, not_loaded

_MARKED = re.compile(r"flashqla:(TypeError|ValueError|NotImplementedError): (.*)", re.DOTALL)
_TYPES = {"TypeError": TypeError, "ValueError": ValueError, "NotImplementedError": NotImplementedError}
_SCHEMA_MISMATCH = "Expected a value of type"


def call(name: str, arguments: tuple):
    """Runs the op; errors are ValueError, TypeError or NotImplementedError and name the argument."""
    op = OPS.get(name)
    if op is None:
        raise not_loaded()
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        translated = _translated(op, arguments, error)
        if translated is None:
            raise
        raise translated from None


def _translated(op, arguments: tuple, error: RuntimeError) -> Exception | None:
    text = str(error)
    marked = _MARKED.search(text)
    if marked:
        return _TYPES[marked[1]](marked[2].strip())
    if _SCHEMA_MISMATCH in text:
        return TypeError(text.splitlines()[0])
    return _device_error(op, arguments)


def _device_error(op, arguments: tuple) -> Exception | None:
    """The dispatcher found no kernel: tensors on several devices, or on one that we have no kernels for."""
    names = [argument.name for argument in op._schema.arguments]
    devices = {name: value.device for name, value in zip(names, arguments, strict=True) if isinstance(value, torch.Tensor)}
    for name, device in devices.items():
        if device != devices["q"]:
            return ValueError(f"{name}: expected device {devices['q']} as q, got {device}")
    reason = device_support(devices["q"])
    return NotImplementedError(reason) if reason else None


def device_support(device: torch.device | str) -> str | None:
    """None if the operations run on `device`, else a sentence that says why not."""
    kind = torch.device(device).type
    if kind == "cpu":
        return str(not_loaded()) if not OPS else None
    return f"flash_qla has no kernels for device type '{kind}': this build runs on the CPU only"


_known: set[tuple] = set()
_warned: set[str] = set()


def warn_if_slow(name: str, arguments: tuple) -> None:
    """One warning for each reason why the slow reference has to run. Costs one look-up in a set once a kind of call is known."""
    q, _, v = arguments[:3]
    kind = (name, q.dtype, q.shape[-1], v.shape[-1], *arguments[9:13])
    if kind in _known:
        return
    answers = call(f"explain_{name}", arguments)
    _known.add(kind)
    if q.dtype == torch.float64 or os.environ.get("FLASHQLA_IMPL") == "reference":
        return
    refusals = []
    for implementation, reason in zip(answers[::2], answers[1::2], strict=True):
        if not reason:
            break
        refusals.append(f"{implementation}: {reason}")
    else:
        return
    text = f"flash_qla.{name} runs on the slow reference implementation, because " + "; ".join(refusals)
    if implementation == "reference" and text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
