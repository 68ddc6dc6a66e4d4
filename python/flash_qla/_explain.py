"""Which implementation would run, and why the others would not."""

import torch
from torch import Tensor

from ._arguments import op_inputs, refuse_peer_options, state_order
from ._call import explanation


class Explanation(list):
    """(implementation, why it refuses) in the order of trial; an empty reason: it takes the call. str() is a table."""

    def __init__(self, operation: str, answers: list[tuple[str, str]]):
        super().__init__(answers)
        self.operation = operation

    @property
    def implementation(self) -> str | None:
        """The one that runs: the first without a reason against it."""
        return next((name for name, reason in self if not reason), None)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self), default=0)
        lines = [f"{self.operation}: {self.implementation or 'nothing takes this call'}"]
        for name, reason in self:
            said = reason or ("runs" if name == self.implementation else "would run, but comes later")
            lines.append(f"  {name:<{width}}  {said}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    operation: str = "chunk_forward",
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    force_intra_cp: bool = False,
    cp_context: object = None,
    head_first: bool = False,
    recompute_in_backward: bool = False,
) -> Explanation:
    """Which implementation `chunk_gated_delta_rule` would run for these arguments, and why others refuse. Computes nothing.

    Takes the arguments of `chunk_gated_delta_rule`, which are checked as there (meta tensors will do), and:

    Args:
        operation: "chunk_forward", "chunk_backward" or "recurrent_forward" (`fused_recurrent_gated_delta_rule`).

    Returns:
        A list of (implementation, reason); ``implementation`` is the one that runs, and str() gives a table.

    >>> import torch, flash_qla
    >>> x = torch.zeros(1, 8, 2, 64, dtype=torch.float64)
    >>> flash_qla.explain(x, x, x).implementation
    'reference'
    """
    operations = ("chunk_forward", "chunk_backward", "recurrent_forward")
    if operation not in operations:
        raise ValueError(f"operation: expected one of {', '.join(operations)}, got {operation!r}")
    refuse_peer_options(chunk_size=chunk_size, cp_context=cp_context, head_first=head_first)
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
    rest = (None, None, 0b111, None) if operation == "chunk_backward" else (output_final_state,)
    with torch.no_grad():
        answers = explanation(operation, (*inputs, initial_state, *rest))
    return Explanation(operation, list(zip(answers[::2], answers[1::2], strict=True)))
