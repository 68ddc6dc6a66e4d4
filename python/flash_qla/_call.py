"""Calls an op and gives its errors the Python type they were thrown for.

The checks live in the C++ library and nowhere else. The stable ABI turns every C++ exception into a RuntimeError, so the op
libraries mark the message with the type (bindings/torch/calls.hpp).
"""

import os
import re
import sys
import warnings
from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from ._load import OPS, cuda_load_error, not_loaded

_TYPES = {
    "TypeError": TypeError,
    "ValueError": ValueError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}
_MARKED = re.compile(rf"flashqla:({'|'.join(_TYPES)}): (\w+)(.*)", re.DOTALL)
_OTHER_SUBJECT = re.compile(r"(memory apart from that of |a multiple of )(\w+)")
_SCHEMA_MISMATCH = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'")

# Where the C++ library's names are not those of the Python arguments.
_RENAMED = {
    "a_log": "A_log",
    "batch": "batch size",
    "dim_k": "head size of q and k",
    "dim_v": "head size of v",
    "dtype": "q",
    "heads_qk": "heads of q and k",
    "heads_v": "heads of v",
    "d_o": "do",
    "d_final_state": "dht",
    "l2norm": "use_qk_l2norm_in_kernel",
}
_RENAMED_IN_POOLS = {
    "state": "state_pool",
    "initial_state": "state_pool",
    "final_state": "state_pool",
    "read": "read_rows",
    "write": "write_rows",
    "stored": "checkpoints",
    "stored_rows": "checkpoint_rows",
}


def call(name: str, arguments: tuple):
    """Runs the op; errors have the types of _TYPES, and those of an argument name it."""
    op = OPS.get(name)
    if op is None:
        raise not_loaded()
    if torch.compiler.is_compiling():
        return op(*arguments)  # its fake kernel calls with_typed_errors
    if getattr(forward_ad, "_current_level", -1) >= 0:
        refuse_forward_mode(arguments)
    return with_typed_errors(name, arguments)


def mark_written(*tensors: torch.Tensor | None) -> None:
    """Counts the writes of an op in place, which torch does for its own ops alone: a backward that needs the old contents is then
    refused instead of wrong."""
    if not torch.compiler.is_compiling():  # compiled calls count them
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def refuse_forward_mode(arguments: tuple) -> None:
    """An op without autograd would drop the tangents silently."""
    for value in arguments:
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                "flash_qla: forward-mode derivatives of the gated delta rule do not exist; use reverse mode (backward)"
            )


def with_typed_errors(name: str, arguments: tuple):
    """`call` outside of torch.compile's tracing."""
    try:
        return OPS[name](*arguments)
    except RuntimeError as error:
        translated = _translated(name, arguments, error)
        if translated is None:
            raise
        raise translated from None


def _translated(name: str, arguments: tuple, error: RuntimeError) -> Exception | None:
    text = str(error)
    if marked := _MARKED.search(text):
        kind, subject, rest = marked.groups()
        rest = _OTHER_SUBJECT.sub(lambda match: match[1] + _public_name(name, match[2]), rest)
        return _TYPES[kind](_public_name(name, subject) + rest.strip())
    if mismatch := _SCHEMA_MISMATCH.search(text):
        expected, subject, got = mismatch.groups()
        return TypeError(f"{_public_name(name, subject)}: expected {expected}, got {got}")
    if "functorch transforms" in text:
        return NotImplementedError(
            "flash_qla: torch.func.grad and its like do not exist for the gated delta rule; use backward() or torch.autograd.grad"
        )
    return device_error(name, arguments)


def _public_name(name: str, subject: str) -> str:
    """What the function that runs op `name` calls its argument `subject`."""
    if "_pool" in name:
        subject = _RENAMED_IN_POOLS.get(subject, subject)
    return _RENAMED.get(subject, subject)


def device_error(name: str, arguments: tuple) -> Exception | None:
    """The dispatcher found no kernel: tensors on several devices, on one that there are no kernels for, or no plain tensors."""
    names = [_public_name(name, argument.name) for argument in OPS[name]._schema.arguments]
    tensors = {n: value for n, value in zip(names, arguments, strict=True) if isinstance(value, torch.Tensor)}
    for subject, tensor in tensors.items():
        if not is_dense(tensor):
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
            return TypeError(f"{subject}: expected a dense tensor, got {kind}")
    if "q" not in tensors:
        return None
    expected = tensors["q"].device
    for subject, tensor in tensors.items():
        if tensor.device != expected:
            return ValueError(f"{subject}: expected device {expected} as q, got {tensor.device}")
    reason = device_support(expected)
    return NotImplementedError(reason) if reason else None


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def device_support(device: torch.device | str) -> str | None:
    """None if the operations run on `device`, else a sentence that says why not. For a CUDA device this starts the driver.

    >>> import flash_qla
    >>> flash_qla.device_support("mps")
    "flash_qla has no kernels for device type 'mps': there are some for the CPU and for CUDA devices"
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return None if OPS else str(not_loaded())
    if device.type == "cuda":
        reason = cuda_load_error or torch.ops.flashqla.missing_for_cuda(device.index or 0)
    else:
        reason = "there are some for the CPU and for CUDA devices"
    return f"flash_qla has no kernels for device type '{device.type}': {reason}" if reason else None


def explanation(name: str, arguments: tuple) -> list[str]:
    """Pairs of implementation and reason, in the order of trial. On CUDA devices only shapes are looked at."""
    q = arguments[0]
    if not (isinstance(q, torch.Tensor) and q.is_cuda):
        return call(f"explain_{name}", arguments)
    if error := device_error(name, arguments):
        raise error
    question = (meta_like(x) if isinstance(x, torch.Tensor) else x for x in arguments)
    return call(*question_about(name, q.device, question))


def question_about(name: str, device: torch.device, arguments: Iterable) -> tuple[str, tuple]:
    """The op that explains calls of `name` on `device`, with its arguments; tensors are meta tensors."""
    if device.type == "cuda":
        return f"explain_{name}.cuda", (device.index or 0, *arguments)
    return f"explain_{name}", tuple(arguments)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_known: set[tuple] = set()
_warned: set[str] = set()


def warn_if_slow(name: str, arguments: tuple) -> None:
    """One warning for each reason why the slow reference has to run. Costs a look-up in a set once a kind of call is known."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return  # the fake kernels ask
    q, _, v = arguments[:3]
    if isinstance(q, torch.Tensor) and q.is_cuda:
        return  # no reference there
    if type(q) not in _PLAIN or type(v) not in _PLAIN or q.dim() != 4 or v.dim() != 4:
        return  # traced (the fake kernels ask) or wrong (the call itself will say so)
    kind = (name, q.dtype, q.size(3), v.size(3), *arguments[9:13])
    if kind in _known:
        return
    # Asked with tensors of no content: those of the call may be under a transform (vmap), which explanations know nothing of.
    question = tuple(meta_like(x) if isinstance(x, torch.Tensor) else x for x in arguments)
    if not any(new is None and old is not None for new, old in zip(question, arguments, strict=True)):
        warn_if_reference(name, q.dtype, call(f"explain_{name}", question))
        _known.add(kind)


def meta_like(tensor: torch.Tensor) -> torch.Tensor | None:
    """Shape, strides and dtype alone; None if a size is one that only the data will tell, or if there are no strides."""
    if not is_dense(tensor):
        return None
    sizes, strides = ([known_size(x) for x in numbers] for numbers in (tensor.shape, tensor.stride()))
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def known_size(size: int | torch.SymInt) -> int | None:
    """The size, or what a symbolic one stands for at the moment; None if only the data will tell."""
    return size if isinstance(size, int) else getattr(size.node, "_hint", None)


def warn_if_reference(name: str, dtype: torch.dtype, answers: list[str]) -> None:
    """`answers`: pairs of implementation and reason, as explain_* ops return them."""
    if dtype == torch.float64 or os.environ.get("FLASHQLA_IMPL") == "reference":
        return
    refusals = {}
    for implementation, reason in zip(answers[::2], answers[1::2], strict=True):
        if not reason:
            break
        refusals[implementation] = reason
    text = f"flash_qla: {name} runs on the slow reference implementation, because " + "; ".join(
        f"{i}: {r}" for i, r in refusals.items()
    )
    if implementation == "reference" and implementation not in refusals and text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """How far up the stack the first frame outside this package is, as warnings.warn counts."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("flash_qla"):
        level, frame = level + 1, frame.f_back
    return level
