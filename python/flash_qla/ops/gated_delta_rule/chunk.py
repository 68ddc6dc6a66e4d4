"""Whole sequences: the operation for training and prefill, and its forward and backward as separate functions."""

import torch
from torch import Tensor

from ..._arguments import expect_tensors, op_inputs, refuse_peer_options, state_order, wants_gradient
from ..._call import call, warn_if_slow

_TOKENS_PER_CHUNK = 64


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
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
) -> tuple[Tensor, Tensor | None]:
    r"""The gated delta rule over whole sequences, with gradients.

    Per value head, with a state S of shape [K, V] that starts at ``initial_state`` or zero (docs/math.md)::

        S <- exp(g_t) S;   e = beta_t (v_t - k_t S);   S <- S + k_t^T e;   o_t = scale q_t S

    Shapes: B batch entries, T tokens, Hq heads of q and k, Hv heads of v (a multiple of Hq: value head h reads head
    h // (Hv / Hq) of q and k), head sizes K and V from 1 to 256, N sequences (B of them, or those of ``cu_seqlens``).
    All strides are free; q, k, v are copied only if their last dimension is not contiguous.

    Args:
        q: [B, T, Hq, K], float32, bfloat16 or float16 (float64 runs in the slow reference).
        k: [B, T, Hq, K], dtype of q.
        v: [B, T, Hv, V], dtype of q. Under autocast, q and k that differ are cast to the dtype of v.
        g: [B, T, Hv], natural logarithm of the decay of each token; 0 keeps the state, -inf forgets it, positive values grow
            it. None: no decay. With ``use_gate_in_kernel`` the raw gate. float32, bfloat16 or float16, never rounded.
        beta: [B, T, Hv], update strength, dtypes as g. None: 1.
        scale: factor of o; default K ** -0.5. 0 is a legal value.
        initial_state: [N, Hv, K, V] in float32, bfloat16 or float16; never written. None: zero.
        output_final_state: return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: replace each row x of q and k by x / sqrt(sum(x^2) + 1e-6).
        use_beta_sigmoid_in_kernel: use sigmoid(beta).
        allow_neg_eigval: use 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        use_gate_in_kernel: use the log decay -exp(A_log) * softplus(g + dt_bias).
        A_log: [Hv], needed by ``use_gate_in_kernel``.
        dt_bias: [Hv], optional with ``use_gate_in_kernel``.
        state_v_first: states are [N, Hv, V, K].
        transpose_state_layout: deprecated name of ``state_v_first``.
        cu_seqlens: [N + 1], int32 or int64: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] of the single
            batch entry (B = 1). Starts at 0, never decreases; rows past the last offset give zeros in o and in every gradient.
            On a CUDA device they are not looked at before: kernels stay inside the tensors whatever they say.
        cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU, used in its place by calls on the CPU.
        chunk_indices: accepted, not needed.
        chunk_size: 16, 32 or 64; the result does not depend on it.
        auto_cp, enable_fwd_cp_cache, force_intra_cp: how GPU kernels may split the work; the result does not depend on them.
        cp_context: must be None.
        head_first: must be False.
        recompute_in_backward: keep only the inputs for the backward. By default a call that records gradients also keeps, where
            the implementation can use it, what saves the backward a fifth of its time: (K / 64 + 1) V float32 numbers a token
            and value head.

    Returns:
        o [B, T, Hv, V] in the dtype of v, and the final state [N, Hv, K, V] in float32 (float64 with float64 inputs) or None.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        NotImplementedError: the call is legal, but nothing here can run it; the message says why.
        OutOfMemoryError: torch's; results or workspace could not be allocated.
        RuntimeError: when a function compiled by torch.compile runs, for what only the contents of a tensor show (offsets, and
            rows of a pool): the same message after its type (``flashqla:ValueError: ``), with the C++ API's names (``read`` for
            ``read_rows``).

    Gradients come in the dtype of their inputs, for any of q, k, v, g, beta, initial_state, A_log, dt_bias. Results and
    gradients do not depend on the number of threads, bit for bit. Second derivatives, forward mode, torch.func.grad and
    vmap are refused.

    >>> import torch
    >>> from flash_qla import chunk_gated_delta_rule
    >>> q, k = torch.randn(2, 1, 100, 2, 64).unbind()
    >>> v = torch.randn(1, 100, 4, 64, requires_grad=True)
    >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 64]))
    >>> o.sum().backward()
    >>> v.grad.shape
    torch.Size([1, 100, 4, 64])
    """
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
    return run_chunks(inputs, initial_state, output_final_state, not recompute_in_backward)


chunk_gdn = chunk_gated_delta_rule


def run_chunks(
    inputs: tuple, initial_state: Tensor | None, output_final_state: bool, save: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Through the op with autograd, or the one without if nothing asks for a gradient."""
    arguments = (*inputs, initial_state, bool(output_final_state))
    warn_if_slow("chunk_forward", arguments)
    if wants_gradient(*inputs[:7], initial_state):
        o, final_state, _ = call("chunk_forward_training", (*arguments, save))
    else:
        o, final_state = call("chunk_forward", arguments)
    return o, final_state if output_final_state else None


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context: object = None,
    is_train: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, None]:
    """The forward alone, with the intermediate results that `chunk_gated_delta_rule_bwd` and others want. Records no gradient.

    Shapes, dtypes and defaults as in `chunk_gated_delta_rule`; ``q`` and ``k`` are used as they are (normalise them first).

    Args:
        output_h: return the states that enter every chunk of 64 tokens.
        auto_cp, enable_fwd_cp_cache, is_train: how GPU kernels may split and keep the work; the result does not depend on them.
        cp_context: must be None.

    Returns:
        (g, A, o, h, final_state, cp_cache):
        g [B, T, Hv] float32, the sum of the log decay from the start of the chunk up to each token (a token's decay below
        -128, whose exponential is 0, counts as -128); A [B, T, Hv, 64] in the dtype of k, (I + stril(beta_i k_i.k_j))^-1 of
        each chunk: row = token, column = position in the chunk, unit diagonal, zeros above it, no decay in it; o [B, T, Hv,
        V]; h [B, ceil(T / 64), Hv, K, V] in the dtype of k, or [1, sum(ceil(length / 64)), ...] with ``cu_seqlens`` (on a CUDA
        device [1, T // 64 + N, ...], of which the first so many are written), or None;
        final_state [N, Hv, K, V] float32 or None; cp_cache None.

    >>> import torch
    >>> from flash_qla import chunk_gated_delta_rule_fwd
    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
    >>> g, A, o, h, final_state, cp_cache = chunk_gated_delta_rule_fwd(
    ...     q, k, torch.randn(1, 100, 2, 64), -torch.rand(1, 100, 2), torch.rand(1, 100, 2), output_h=True)
    >>> A.shape, h.shape
    (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 2, 64, 64]))
    """
    refuse_peer_options(cp_context=cp_context)
    inputs = op_inputs(
        q, k, v, g, beta, scale=scale, use_qk_l2norm_in_kernel=False, state_v_first=state_v_first, cu_seqlens=cu_seqlens
    )
    arguments = (*inputs, initial_state, output_final_state, output_h)
    warn_if_slow("chunk_forward_low_level", arguments)
    with torch.no_grad():
        g, a, o, h, final_state = call("chunk_forward_low_level", arguments)
        if output_h:
            chunks = (q.shape[1] + _TOKENS_PER_CHUNK - 1) // _TOKENS_PER_CHUNK
            h = h.unflatten(0, (q.shape[0], chunks)) if cu_seqlens is None else h.unsqueeze(0)
    return g, a, o, h if output_h else None, final_state if output_final_state else None, None


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    A: Tensor | None,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: object = None,
    cp_context: object = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """The backward alone, from what `chunk_gated_delta_rule_fwd` was given and returned.

    Args:
        q, k, v, beta, scale, initial_state, cu_seqlens, state_v_first: as given to the forward (q and k normalised).
        g: [B, T, Hv] float32, the cumulative g that the forward returned.
        A: the A that the forward returned. Its shape and dtype are checked; its values are computed afresh and not read.
        do: [B, T, Hv, V], gradient of o; strides free (0 too).
        dht: [N, Hv, K, V], gradient of the final state. None: zero.
        auto_cp: how GPU kernels may split the work.
        cp_cache: what the forward returned, which is None.
        cp_context: must be None.

    Returns:
        (dq, dk, dv, db, dg, dh0): dq, dk, dv in the dtype of q; db [B, T, Hv] in the dtype of beta; dg [B, T, Hv] float32
        with respect to the raw log decay of each token, not to the cumulative g; dh0 [N, Hv, K, V] float32, or None without
        ``initial_state``. db is None without beta.

    >>> import torch
    >>> from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
    >>> v, beta = torch.randn(1, 100, 2, 64), torch.rand(1, 100, 2)
    >>> g, A, o, *_ = chunk_gated_delta_rule_fwd(q, k, v, -torch.rand(1, 100, 2), beta)
    >>> dq, dk, dv, db, dg, dh0 = chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, torch.ones_like(o))
    >>> dg.shape, dh0
    (torch.Size([1, 100, 2]), None)
    """
    refuse_peer_options(cp_context=cp_context)
    if cp_cache is not None:
        raise ValueError("cp_cache: expected None, which is what chunk_gated_delta_rule_fwd returns")
    expect_tensors(q=q, k=k, v=v, g=g)
    if A is not None:
        expect_tensors(A=A)
        if A.device != k.device:
            raise ValueError(f"A: expected device {k.device} as k, got {A.device}")
        expected = (*v.shape[:3], _TOKENS_PER_CHUNK)
        if v.dim() == 4 and tuple(A.shape) != expected:
            raise ValueError(f"A: expected shape {list(expected)}, got {list(A.shape)}")
        if A.dtype != k.dtype:
            raise TypeError(f"A: expected {k.dtype} as k, got {A.dtype}")
    inputs = op_inputs(
        q, k, v, g, beta, scale=scale, use_qk_l2norm_in_kernel=False, state_v_first=state_v_first, cu_seqlens=cu_seqlens
    )
    inputs = (*inputs[:9], "cumulative", *inputs[10:])
    wanted = 0b1111 | (beta is not None) << 4
    state = initial_state
    if initial_state is not None:
        expect_tensors(initial_state=initial_state)
        wanted |= 1 << 5
        if initial_state.dtype in (torch.bfloat16, torch.float16):
            state = (
                initial_state.float()
            )  # exact; the gradient comes in the dtype of what it belongs to, and callers expect float32
    arguments = (*inputs, state, do, dht, wanted, None)
    warn_if_slow("chunk_backward", arguments)
    with torch.no_grad():
        dq, dk, dv, dg, db, dh0, _, _ = call("chunk_backward", arguments)
    return dq, dk, dv, None if beta is None else db, dg, None if initial_state is None else dh0
