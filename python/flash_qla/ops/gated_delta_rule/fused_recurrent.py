"""A few tokens a sequence, one after another: decoding."""

from torch import Tensor

from ..._arguments import op_inputs, state_order, wants_gradient
from ..._call import call, warn_if_slow
from .chunk import run_chunks


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same operation as `chunk_gated_delta_rule`, token by token: for one or a few tokens a sequence (any number is right).

    Arguments, results and errors are those of `chunk_gated_delta_rule`, in another order. ``initial_state`` is never written:
    a new state is returned (`recurrent_gated_delta_rule_pool` works in place). When a gradient is wanted, the chunked
    operation runs.

    Args:
        gk, gv: decays per key or value dimension; must be None.
        beta: [B, T, Hv]; a strength for each value dimension is refused.

    >>> import torch
    >>> from flash_qla import fused_recurrent_gated_delta_rule
    >>> q = k = torch.randn(3, 1, 2, 64)
    >>> v, g, beta = torch.randn(3, 1, 4, 64), -torch.rand(3, 1, 4), torch.rand(3, 1, 4)
    >>> state = torch.zeros(3, 4, 64, 64)
    >>> o, state = fused_recurrent_gated_delta_rule(
    ...     q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> o.shape, state.shape
    (torch.Size([3, 1, 4, 64]), torch.Size([3, 4, 64, 64]))
    """
    for name, value in (("gk", gk), ("gv", gv)):
        if value is not None:
            raise NotImplementedError(
                f"{name}: a decay for each dimension of a head is not computed here; pass one decay a head as g"
            )
    if isinstance(beta, Tensor) and beta.dim() == 4:
        raise NotImplementedError("beta: a strength for each value dimension is not computed here; pass one a head, [B, T, Hv]")
    inputs = op_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_order(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    if wants_gradient(*inputs[:7], initial_state):
        return run_chunks(inputs, initial_state, output_final_state)
    arguments = (*inputs, initial_state, bool(output_final_state))
    warn_if_slow("recurrent_forward", arguments)
    o, final_state = call("recurrent_forward", arguments)
    return o, final_state if output_final_state else None


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
