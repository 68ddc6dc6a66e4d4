"""Shapes of the results, for torch.compile and meta tensors.

Errors must read the same as those of a call, so the checks are the C++ library's here too: it is asked about meta tensors of
the sizes that a symbolic size stands for at the moment. It reads no memory and adds no guard.
"""

import torch
from torch import Tensor

from ._call import device_error, known_size, meta_like, question_about, warn_if_reference, with_typed_errors
from ._load import OPS

_TOKENS_PER_CHUNK = 64


def _without_fakes():
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # private, so that importing must not depend on it

    return unset_fake_temporarily()


def _check(name: str, arguments: tuple) -> None:
    with _without_fakes():
        error = device_error(name, arguments)
        if error is not None:
            raise error
        concrete = [meta_like(x) if isinstance(x, Tensor) else x for x in arguments]
        if any(new is None and old is not None for new, old in zip(concrete, arguments, strict=True)):
            return  # a size that only the data will tell: the call itself checks it
        answers = with_typed_errors(*question_about(name, arguments[0].device, concrete))
    warn_if_reference(name, arguments[0].dtype, answers)
    if all(answers[1::2]):
        reasons = "; ".join(f"{i}: {reason}" for i, reason in zip(answers[::2], answers[1::2], strict=True))
        raise NotImplementedError(f"no implementation takes this call: {reasons}")


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _state_shape(leading: list, q: Tensor, v: Tensor, state_v_first: bool) -> list:
    dims = [v.shape[3], q.shape[3]] if state_v_first else [q.shape[3], v.shape[3]]
    return [*leading, v.shape[2], *dims]


def _forward(name: str):
    def fake(*arguments):
        _check(name, arguments)
        q, _, v, _, _, _, _, cu_seqlens, *_, state_v_first, _, output_final_state = arguments
        return v.new_empty(v.shape, dtype=q.dtype), _final_state(q, v, cu_seqlens, state_v_first, output_final_state)

    return fake


def _training(*arguments):
    o, final_state = _forward("chunk_forward")(*arguments[:-1])
    q, _, v = arguments[:3]
    elements = 0
    if arguments[-1] and _saves(arguments):
        # SavedShape of src/common/saved.hpp
        rows, padded_k, padded_v = v.shape[0] * v.shape[1], (q.shape[3] + 15) // 16 * 16, (v.shape[3] + 31) // 32 * 32
        elements = 16 + v.shape[2] * padded_v * (torch.sym_max(rows - 1, 0) // 64 * padded_k + rows)
    return o, final_state, q.new_empty([elements], dtype=torch.float32)


def _saves(arguments: tuple) -> bool:
    """Whether the implementation that the call will run on leaves something for the backward: as one token would have it."""

    def one_token(x: Tensor) -> Tensor:
        sizes = [known_size(size) or 1 for size in x.shape]
        sizes[:2] = [1] * len(sizes[:2]) if x.dim() > 1 else sizes
        return torch.empty(sizes, dtype=x.dtype, device="meta")

    q, k, v, g, beta, a_log, dt_bias, _, *options, initial_state, output_final_state, save = arguments
    with _without_fakes():
        rows = (None if x is None else one_token(x) for x in (q, k, v, g, beta))
        heads = (None if x is None else one_token(x) for x in (a_log, dt_bias))
        question = (*rows, *heads, None, *options, None, output_final_state, save)
        return with_typed_errors(*question_about("saved_elements", arguments[0].device, question)) > 0


def _final_state(q, v, cu_seqlens, state_v_first, wanted):
    if not wanted:
        return q.new_empty([0], dtype=_state_dtype(q))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(_state_shape([sequences], q, v, state_v_first), dtype=_state_dtype(q))


def _low_level(*arguments):
    _check("chunk_forward_low_level", arguments)
    q, _, v, _, _, _, _, cu_seqlens, *_, state_v_first, _, output_final_state, output_h = arguments
    batch, tokens, heads, _ = v.shape
    g = q.new_empty([batch, tokens, heads], dtype=_state_dtype(q))
    a = q.new_empty([batch, tokens, heads, _TOKENS_PER_CHUNK])
    if not output_h:
        h = q.new_empty([0])
    else:
        if cu_seqlens is None:
            rows = batch * ((tokens + _TOKENS_PER_CHUNK - 1) // _TOKENS_PER_CHUNK)
        elif cu_seqlens.is_cuda:
            rows = tokens // _TOKENS_PER_CHUNK + cu_seqlens.shape[0] - 1
        else:
            rows = torch.library.get_ctx().new_dynamic_size()
        h = q.new_empty(_state_shape([rows], q, v, state_v_first))
    return g, a, v.new_empty(v.shape), h, _final_state(q, v, cu_seqlens, state_v_first, output_final_state)


def _pool(name: str):
    def fake(*arguments):
        _check(name, arguments)
        return arguments[2].new_empty(arguments[2].shape)

    return fake


def _chunk_backward(*arguments):
    _check("chunk_backward", arguments)
    q, k, v, g, beta, A_log, dt_bias, *_, initial_state, _, _, wanted, _ = arguments
    results = []
    for bit, tensor in enumerate((q, k, v, g, beta, initial_state, A_log, dt_bias)):
        dtype = q.dtype if tensor is None else tensor.dtype
        results.append(q.new_empty(tensor.shape if wanted >> bit & 1 else [0], dtype=dtype))
    return tuple(results)


def register() -> None:
    kernels = {
        "chunk_forward": _forward("chunk_forward"),
        "chunk_forward_training": _training,
        "recurrent_forward": _forward("recurrent_forward"),
        "chunk_forward_low_level": _low_level,
        "chunk_forward_pool": _pool("chunk_forward_pool"),
        "recurrent_forward_pool": _pool("recurrent_forward_pool"),
        "chunk_backward": _chunk_backward,
    }
    for name, kernel in kernels.items():
        torch.library.register_fake(f"flashqla::{name}", kernel)


if OPS:
    register()
