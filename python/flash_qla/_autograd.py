"""Gradients: the training op's backward is a second op. What cannot be differentiated is refused by name."""

import torch

from ._call import call, warn_if_slow
from ._load import OPS

# Positions in the schema of chunk_forward_training: of initial_state; of the differentiable inputs, in the order of
# chunk_backward's results.
_INPUTS = 13
_ARGUMENTS = _INPUTS + 3
_DIFFERENTIABLE = (0, 1, 2, 3, 4, _INPUTS, 5, 6)  # q k v g beta initial_state A_log dt_bias
_TENSORS = (*range(8), _INPUTS)  # those and cu_seqlens


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(inputs[i] for i in _TENSORS), output[2])
    ctx.options = inputs[8:_INPUTS]
    output_final_state = inputs[_INPUTS + 1]
    ctx.mark_non_differentiable(*output[2 if output_final_state else 1 :])


def _backward(ctx, d_o, d_final_state, _):
    results = [None] * _ARGUMENTS
    if d_o is None and d_final_state is None:
        return tuple(results)
    *inputs, initial_state, saved = ctx.saved_tensors
    wanted = sum(1 << bit for bit, i in enumerate(_DIFFERENTIABLE) if ctx.needs_input_grad[i])
    arguments = (*inputs, *ctx.options, initial_state, d_o, d_final_state, wanted, saved)
    warn_if_slow("chunk_backward", arguments)
    gradients = call("chunk_backward", arguments)
    for bit, i in enumerate(_DIFFERENTIABLE):
        if wanted >> bit & 1:
            results[i] = gradients[bit]
    return tuple(results)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flash_qla: second derivatives of the gated delta rule do not exist; the backward cannot be differentiated"
    )


def _refuse_vmap(info, in_dims, *arguments):
    raise NotImplementedError(
        "flash_qla: vmap over the gated delta rule does not exist; fold the mapped dimension into the batch dimension"
    )


def register() -> None:
    torch.library.register_autograd("flashqla::chunk_forward_training", _backward, setup_context=_save_for_backward)
    torch.library.register_autograd("flashqla::chunk_backward", _no_second_derivative)
    for name in OPS:
        if not name.startswith("explain_"):
            torch.library.register_vmap(f"flashqla::{name}", _refuse_vmap)


if OPS:
    register()
