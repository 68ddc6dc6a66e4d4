"""The operations on a pool of states that the caller owns, in place: for serving. They have no gradient.

A pool is [slots, Hv, K, V] (or [slots, Hv, V, K] with ``state_v_first``) in float32, bfloat16 or float16. Slots may lie any
distance apart; a slot's last dimension is contiguous. An entry reads its first state from one slot and writes its last one to
another (default: the same):

- read -1: start from zero. write -1: not written. Both -1: padding; its rows of o are zero and nothing else is touched.
- No slot may be written twice in a call, nor written for one entry and read for another.
"""

import torch
from torch import Tensor

from ..._arguments import expect_tensors, op_inputs, refuse_gradient
from ..._call import call, mark_written, warn_if_slow

_TOKENS_PER_CHUNK = 64


def chunk_gated_delta_rule_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state_pool: Tensor,
    read_rows: Tensor,
    *,
    write_rows: Tensor | None = None,
    states_every: int | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Tensor:
    """Prefill: `chunk_gated_delta_rule` from and into a pool of states; keeps states at regular places for prefix caching.

    Shapes, dtypes and options as in `chunk_gated_delta_rule`.

    Args:
        state_pool: [slots, Hv, K, V]; written.
        read_rows: [N], int32 or int64: slot that each sequence starts from, -1 for zero.
        write_rows: [N]: slot for each last state, -1 for none. Default ``read_rows``. Where both are -1 (the
            default's too) the sequence is padding: its rows of o are zero, its checkpoints have rows but are not kept. To start
            from zero, name a slot to write.
        states_every: also keep the state after every so many tokens of a sequence, a multiple of 64.
        checkpoints: [rows, Hv, K, V], where they go; written. Default: ``state_pool``, which needs ``checkpoint_rows``.
        checkpoint_rows: [`num_checkpoints`]: row for each of them in the order of sequences and tokens, -1 skips one.
            Default: rows 0, 1, ...
        prefix_lengths: [N]: tokens that came before each sequence; states are then kept where prefix + position is a multiple of
            ``states_every``.

    Returns:
        o [B, T, Hv, V].

    >>> import torch
    >>> from flash_qla import chunk_gated_delta_rule_pool
    >>> pool = torch.zeros(8, 2, 64, 64)
    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 200, 2, 64), dim=-1)
    >>> v, g, beta = torch.randn(1, 200, 2, 64), -torch.rand(1, 200, 2), torch.rand(1, 200, 2)
    >>> offsets = torch.tensor([0, 150, 200])   # two sequences; the first starts from zero, the second from slot 5
    >>> o = chunk_gated_delta_rule_pool(
    ...     q, k, v, g, beta, pool, torch.tensor([-1, 5]), write_rows=torch.tensor([3, 5]), cu_seqlens=offsets,
    ...     states_every=64, checkpoint_rows=torch.tensor([6, 7]))   # after tokens 64 and 128 of the first
    >>> o.shape, [slot for slot in range(8) if pool[slot].any()]
    (torch.Size([1, 200, 2, 64]), [3, 5, 6, 7])
    """
    expect_tensors(state_pool=state_pool, read_rows=read_rows)
    refuse_gradient("chunk_gated_delta_rule_pool", q, k, v, g, beta, A_log, dt_bias, state_pool, checkpoints)
    if states_every is None:
        for name, value in (
            ("checkpoints", checkpoints),
            ("checkpoint_rows", checkpoint_rows),
            ("prefix_lengths", prefix_lengths),
        ):
            if value is not None:
                raise ValueError(f"{name}: belongs to states_every, which was not given")
    elif checkpoints is None and checkpoint_rows is None:
        raise ValueError("checkpoint_rows: needed without checkpoints, to say which slots of state_pool to write")
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
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    write_rows = read_rows if write_rows is None else write_rows
    arguments = (*inputs, state_pool, read_rows, write_rows, states_every, checkpoints, checkpoint_rows, prefix_lengths)
    warn_if_slow("chunk_forward_pool", arguments)
    o = call("chunk_forward_pool", arguments)
    mark_written(state_pool, checkpoints)
    return o


def num_checkpoints(
    states_every: int,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
) -> Tensor:
    """How many states each sequence keeps with ``states_every``: floor((prefix + length) / n) - floor(prefix / n), int64 [N].

    Args:
        states_every: n.
        batch, tokens: so many sequences of so many tokens, if there is no ``cu_seqlens``.
        cu_seqlens: [N + 1], offsets of the sequences.
        prefix_lengths: [N], tokens that came before each sequence. Default: none.

    >>> import torch
    >>> from flash_qla import num_checkpoints
    >>> num_checkpoints(64, cu_seqlens=torch.tensor([0, 150, 200])).tolist()
    [2, 0]
    """
    if not isinstance(states_every, int) or states_every < 1 or states_every % _TOKENS_PER_CHUNK:
        error = ValueError if isinstance(states_every, int) else TypeError
        raise error(f"states_every: expected a positive multiple of {_TOKENS_PER_CHUNK}, got {states_every!r}")
    if cu_seqlens is not None:
        _expect_integers("cu_seqlens", cu_seqlens)
        if cu_seqlens.numel() == 0:
            raise ValueError("cu_seqlens: expected shape [N+1], got [0]")
        lengths = cu_seqlens.to(torch.int64).diff()
    elif batch is None or tokens is None:
        raise ValueError("cu_seqlens: needed unless batch and tokens are given")
    else:
        for name, size in (("batch", batch), ("tokens", tokens)):
            if not isinstance(size, (int, torch.SymInt)):
                raise TypeError(f"{name}: expected int, got {type(size).__name__}")
            if size < 0:
                raise ValueError(f"{name}: expected at least 0, got {size}")
        device = prefix_lengths.device if isinstance(prefix_lengths, Tensor) else None
        lengths = torch.full((batch,), tokens, dtype=torch.int64, device=device)
    if prefix_lengths is None:
        return lengths // states_every
    _expect_integers("prefix_lengths", prefix_lengths)
    if prefix_lengths.shape != lengths.shape:
        raise ValueError(f"prefix_lengths: expected shape [N={len(lengths)}], got {list(prefix_lengths.shape)}")
    prefix = prefix_lengths.to(torch.int64)
    return (prefix + lengths) // states_every - prefix // states_every


def _expect_integers(name: str, value: Tensor) -> None:
    expect_tensors(**{name: value})
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int64 or int32, got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got {value.dim()}")


def recurrent_gated_delta_rule_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state_pool: Tensor,
    read_rows: Tensor,
    *,
    write_rows: Tensor | None = None,
    accepted: Tensor | None = None,
    token_states: Tensor | None = None,
    token_rows: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Tensor:
    """Decoding and the verification of drafts: `fused_recurrent_gated_delta_rule` from and into a pool of states.

    Shapes, dtypes and options as in `chunk_gated_delta_rule`.

    Rejected drafts cost no copy: keep the state after every token in rows ``token_rows[b, t]`` of the pool, then give those
    rows as the next call's ``read_rows`` [N, P] and the numbers of accepted tokens as ``accepted``: entry n starts from row
    ``read_rows[n, accepted[n] - 1]``. That row may be among those that the same entry writes.

    Args:
        state_pool: [slots, Hv, K, V]; written.
        read_rows: [N], int32 or int64: slot that each sequence starts from, -1 for zero; [N, P] with ``accepted``.
        write_rows: [N]: slot for each last state, -1 for none. Default ``read_rows``; with ``accepted``, none is written. Where
            both are -1 (the default's too) the sequence is padding: its rows of o are zero, and no state of it is kept. To start
            from zero, name a slot to write; with ``accepted`` and without ``write_rows`` that is not needed.
        accepted: [N], 1 to P.
        token_states: [rows, Hv, K, V] or [B, T, Hv, K, V], a buffer apart from the pool for the state after every token; written.
            Default: none, or ``state_pool`` with ``token_rows``.
        token_rows: [B, T]: row for each token, -1 skips one. Default with ``token_states``: row b * T + t.

    Returns:
        o [B, T, Hv, V].

    >>> import torch
    >>> from flash_qla import recurrent_gated_delta_rule_pool
    >>> def inputs(tokens):
    ...     q = k = torch.nn.functional.normalize(torch.randn(2, tokens, 2, 64), dim=-1)
    ...     return q, k, torch.randn(2, tokens, 2, 64), -torch.rand(2, tokens, 2), torch.rand(2, tokens, 2)
    >>> pool = torch.zeros(10, 2, 64, 64)
    >>> o = recurrent_gated_delta_rule_pool(*inputs(1), pool, torch.tensor([0, 1]))   # one token each, in place in slots 0 and 1
    >>> rows = torch.tensor([[2, 3, 4], [5, 6, 7]])
    >>> o = recurrent_gated_delta_rule_pool(    # three drafts each, all states kept, slots 0 and 1 as they were
    ...     *inputs(3), pool, torch.tensor([0, 1]), write_rows=torch.tensor([-1, -1]), token_rows=rows)
    >>> o = recurrent_gated_delta_rule_pool(    # the first kept one draft, the second all three
    ...     *inputs(3), pool, rows, accepted=torch.tensor([1, 3]), token_rows=rows)
    """
    expect_tensors(state_pool=state_pool, read_rows=read_rows)
    refuse_gradient("recurrent_gated_delta_rule_pool", q, k, v, g, beta, A_log, dt_bias, state_pool, token_states)
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
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    if isinstance(token_states, Tensor) and token_states.dim() == 5 and isinstance(q, Tensor) and q.dim() == 4:
        token_states = _as_rows(token_states, q)
    arguments = (*inputs, state_pool, read_rows, write_rows, accepted, token_states, token_rows)
    warn_if_slow("recurrent_forward_pool", arguments)
    o = call("recurrent_forward_pool", arguments)
    mark_written(state_pool, token_states)
    return o


def _as_rows(token_states: Tensor, q: Tensor) -> Tensor:
    """[B, T, Hv, K, V] as [B * T, Hv, K, V], the same memory."""
    batch, tokens = q.shape[:2]
    if token_states.shape[:2] != (batch, tokens):
        raise ValueError(f"token_states: expected shape [B={batch}, T={tokens}, Hv, K, V], got {list(token_states.shape)}")
    if batch > 1 and tokens > 1 and token_states.stride(0) != tokens * token_states.stride(1):
        raise ValueError(
            "token_states: expected batch entries that follow each other without a gap, got strides "
            f"{list(token_states.stride())}; pass the rows [rows, Hv, K, V] of the whole buffer and token_rows"
        )
    return token_states.view(batch * tokens, *token_states.shape[2:])
