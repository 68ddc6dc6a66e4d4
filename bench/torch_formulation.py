"""The gated delta rule in plain PyTorch: what a model would run without flash_qla. The demo and the benchmark measure against it.

Both functions take the leading parameters and the in-operation options of flash_qla.chunk_gated_delta_rule and return
(o, final_state or None); states are [B,Hv,K,V]. Inputs of 16 bits are computed in fp32 (there is no solve_triangular for them),
fp64 stays fp64. Autograd gives the gradients.

chunk_gated_delta_rule: chunks of 64 tokens. With S the state entering a chunk and G = cumulative log decay inside it,
    D_ij = exp(G_i - G_j) for i >= j, else 0          (masked before exp: no overflow, no inf * 0)
    T    = (I + stril(D * (beta o K K^T)))^-1         (solve_triangular of the identity)
    U    = T (beta o V),  W = T (beta exp(G) o K)     (all chunks at once)
    E    = U - W S                                    (chunk after chunk from here)
    O    = scale [(exp(G) o Q) S + (D * Q K^T) E]
    S'   = exp(G_C) S + (exp(G_C - G) o K)^T E
recurrent_gated_delta_rule: the definition, token by token.
"""

import torch
import torch.nn.functional as F

TOKENS_PER_CHUNK = 64


def _operands(q, k, v, g, beta, scale, l2norm, gate, a_log, dt_bias, sigmoid):
    """q, k [B,Hq,T,K], v [B,Hv,T,V], log decay g and beta [B,Hv,T] in the computing dtype, every in-operation option applied."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    if l2norm:
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = v.new_zeros(v.shape[:-1]) if g is None else g.to(dtype).transpose(1, 2)
    if gate:
        bias = 0 if dt_bias is None else dt_bias.to(dtype)[:, None]
        g = -a_log.to(dtype).exp()[:, None] * F.softplus(g + bias)
    beta = v.new_ones(v.shape[:-1]) if beta is None else beta.to(dtype).transpose(1, 2)
    return q, k, v, g, beta.sigmoid() if sigmoid else beta


def _entering_state(initial_state, v, dim_k):
    """[B,Hv,K,V], zero when there is none."""
    if initial_state is None:
        return v.new_zeros(*v.shape[:2], dim_k, v.shape[-1])
    return initial_state.to(v.dtype)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    *,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
):
    out_dtype, tokens, size = q.dtype, q.shape[1], TOKENS_PER_CHUNK
    q, k, v, g, beta = _operands(
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    state = _entering_state(initial_state, v, k.shape[-1])
    group = v.shape[1] // k.shape[1]
    chunks = -(-tokens // size)
    padding = chunks * size - tokens  # rows of zeros: beta 0 writes nothing, log decay 0 keeps the state
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (chunks, size)) for x in (q, k, v))  # [B,H,N,C,D]
    g, beta = (F.pad(x, (0, padding)).unflatten(2, (chunks, size)) for x in (g, beta))  # [B,Hv,N,C]
    g = g.cumsum(-1)

    above = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(above, -torch.inf).exp()
    keys_keys = (k @ k.mT).repeat_interleave(group, 1)  # once per q/k head, then per value head
    scores = (q @ k.mT).repeat_interleave(group, 1) * decay
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    rise = g.exp()[..., None]
    system = decay * keys_keys * beta[..., None]  # solve_triangular reads its strict lower triangle only
    identity = torch.eye(size, dtype=v.dtype, device=v.device).expand_as(system)
    t = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True) * beta[..., None, :]
    u, w, q = t @ v, t @ (rise * k), rise * q
    writers = ((g[..., -1:] - g).exp()[..., None] * k).mT
    keep = g[..., -1].exp()[..., None, None]

    outputs = []
    for n in range(chunks):
        error = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + scores[:, :, n] @ error)
        state = keep[:, :, n] * state + writers[:, :, n] @ error
    o = torch.cat(outputs, 2)[:, :, :tokens] if chunks else v.flatten(2, 3)
    return o.transpose(1, 2).to(out_dtype), state if output_final_state else None


def recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    *,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
):
    out_dtype = q.dtype
    q, k, v, g, beta = _operands(
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    state = _entering_state(initial_state, v, k.shape[-1])
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    decay = g.exp()[..., None, None]
    outputs = []
    for t in range(v.shape[2]):
        key, query = k[:, :, t, :, None], q[:, :, t, None, :]
        state = decay[:, :, t] * state
        error = beta[:, :, t, None, None] * (v[:, :, t, None, :] - key.mT @ state)
        state = state + key * error
        outputs.append(query @ state)
    o = torch.cat(outputs, 2) if outputs else v
    return o.transpose(1, 2).to(out_dtype), state if output_final_state else None
