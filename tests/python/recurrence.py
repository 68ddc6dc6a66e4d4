"""The oracle: docs/math.md token by token in plain PyTorch, in float64, differentiated by autograd. Shares nothing with us."""

import torch
from bounds import relative_rms
from problems import for_oracle


def decay(g, A_log, dt_bias, use_gate):
    """The log decay that the options make of g. [B, T, Hv]"""
    if not use_gate:
        return g
    raw = g if dt_bias is None else g + dt_bias
    return -torch.exp(A_log) * torch.logaddexp(raw, torch.zeros_like(raw))


def strength(beta, use_sigmoid, doubled):
    if not use_sigmoid:
        return beta
    return torch.sigmoid(beta) * (2 if doubled else 1)


def one_sequence(q, k, v, g, beta, scale, state):
    """q, k [T, Hv, K], v [T, Hv, V], g, beta [T, Hv], state [Hv, K, V] -> o [T, Hv, V] and the state after every token."""
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        error = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * error[:, None, :]
        outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
        states.append(state)
    return (torch.stack(outputs) if outputs else v.new_zeros(v.shape)), state, states


def recurrence(
    q,
    k,
    v,
    g=None,
    beta=None,
    *,
    scale=None,
    initial_state=None,
    l2norm=False,
    use_gate=False,
    A_log=None,
    dt_bias=None,
    use_sigmoid=False,
    doubled=False,
    state_v_first=False,
    cu_seqlens=None,
    dtype=torch.float64,
):
    """-> o [B, T, Hv, V], final states [N, Hv, K, V] in the layout asked for, states after every token (a list of lists)."""
    q, k, v, g, beta, A_log, dt_bias, initial_state = (
        None if x is None else x.to(dtype) for x in (q, k, v, g, beta, A_log, dt_bias, initial_state)
    )
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    batch, tokens, heads = v.shape[:3]
    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    g = v.new_zeros(batch, tokens, heads) if g is None else decay(g, A_log, dt_bias, use_gate)
    beta = v.new_ones(batch, tokens, heads) if beta is None else strength(beta, use_sigmoid, doubled)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        offsets = cu_seqlens.tolist()
        spans = [(0, begin, end) for begin, end in zip(offsets, offsets[1:], strict=False)]
    o = [[] for _ in range(batch)]
    finals, token_states = [], []
    for n, (b, begin, end) in enumerate(spans):
        if initial_state is None:
            state = v.new_zeros(heads, q.shape[-1], v.shape[-1])
        else:
            state = initial_state[n].transpose(-1, -2) if state_v_first else initial_state[n]
        part = slice(begin, end)
        rows, last, states = one_sequence(q[b, part], k[b, part], v[b, part], g[b, part], beta[b, part], scale, state)
        o[b].append(rows)
        finals.append(last)
        token_states.append(states)
    past_the_end = tokens - sum(end - begin for b, begin, end in spans if b == 0)
    if past_the_end:
        o[0].append(v.new_zeros(past_the_end, heads, v.shape[-1]))
    final = torch.stack(finals) if finals else v.new_zeros(0, heads, q.shape[-1], v.shape[-1])
    if state_v_first:
        final = final.transpose(-1, -2)
        token_states = [[s.transpose(-1, -2) for s in states] for states in token_states]
    out = torch.stack([torch.cat(parts) for parts in o]) if batch else v.new_zeros(v.shape)
    return out, final, token_states


def single_precision_error(arguments, o, final) -> float:
    """Error of the recurrence itself in single precision, given its results: what those of a kernel can be asked for."""
    with torch.no_grad():
        o32, final32, _ = recurrence(**for_oracle(arguments), dtype=torch.float32)
    return max(relative_rms(o32, o), relative_rms(final32, final))
