"""Calls as the callers of the peers write them: FLA's layer, transformers' models, packed trainers, serving engines."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from bounds import relative_rms
from recurrence import recurrence

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

HIDDEN, HEADS, HEADS_V, K, V = 64, 2, 4, 32, 32


class Layer(torch.nn.Module):
    """A gated delta rule layer with everything inside the operation, as FLA's layer calls it."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 2 * HEADS * K + HEADS_V * V, bias=False)
        self.ab = torch.nn.Linear(HIDDEN, 2 * HEADS_V, bias=False)
        self.out = torch.nn.Linear(HEADS_V * V, HIDDEN, bias=False)
        self.A_log = torch.nn.Parameter(torch.empty(HEADS_V).uniform_(0, 2))
        self.dt_bias = torch.nn.Parameter(torch.randn(HEADS_V))

    def forward(self, x, state=None, use_cache=False, cu_seqlens=None):
        q, k, v = self.qkv(x).split([HEADS * K, HEADS * K, HEADS_V * V], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, size)) for y, size in ((q, K), (k, K), (v, V)))
        a, b = self.ab(x).chunk(2, dim=-1)
        rule = fused_recurrent_gated_delta_rule if x.shape[1] <= 64 and not self.training else chunk_gated_delta_rule
        o, state = rule(
            q=q,
            k=k,
            v=v,
            g=a,
            beta=b,
            initial_state=state,
            output_final_state=use_cache,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
        )
        return self.out(o.flatten(2)), state


def test_fla_layer_trains_and_decodes():
    torch.manual_seed(0)
    layer = Layer()
    x = torch.randn(2, 80, HIDDEN)
    optimiser = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = (layer(x)[0] - x.roll(1, dims=1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in layer.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    layer.eval()
    with torch.no_grad():
        whole, _ = layer(x)
        y, state = layer(x[:, :70], use_cache=True)
        assert state.shape == (2, HEADS_V, V, K)
        parts = [y]
        for t in range(70, 80):
            y, state = layer(x[:, t : t + 1], state, use_cache=True)
            parts.append(y)
        assert relative_rms(torch.cat(parts, dim=1), whole) < 1e-5


def test_transformers_call():
    """q, k, v after a causal convolution [B, C, T] (last dimension not contiguous), heads repeated, g float32, beta bfloat16."""
    torch.manual_seed(0)
    batch, tokens = 2, 50
    channels = 2 * HEADS * K + HEADS_V * V
    mixed = F.silu(
        F.conv1d(torch.randn(batch, channels, tokens + 3), torch.randn(channels, 1, 4) / 4, groups=channels)
    ).bfloat16()
    query, key, value = mixed.transpose(1, 2).split([HEADS * K, HEADS * K, HEADS_V * V], dim=-1)
    query, key, value = (y.reshape(batch, tokens, -1, size) for y, size in ((query, K), (key, K), (value, V)))
    query, key = (y.repeat_interleave(HEADS_V // HEADS, dim=2) for y in (query, key))
    a, b = torch.randn(2, batch, tokens, HEADS_V).unbind()
    g = -torch.zeros(HEADS_V).exp() * F.softplus(a.float())
    beta = b.bfloat16().sigmoid()
    o, state = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None,
    )
    truth, final, _ = recurrence(query, key, value, g, beta, l2norm=True)
    assert o.dtype == torch.bfloat16 and relative_rms(o, truth) < 5e-3 and relative_rms(state, final) < 3e-3
    step, new_state = fused_recurrent_gated_delta_rule(
        query[:, :1], key[:, :1], value[:, :1], g=g[:, :1], beta=beta[:, :1], initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert step.shape == (batch, 1, HEADS_V, V) and new_state.dtype == torch.float32 and new_state is not state


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_keywords_can_be_filtered_by_the_signature(function):
    """A caller that passes what a signature names must not lose an option; there is no **kwargs to hide one."""
    names = set(inspect.signature(function).parameters)
    assert {"g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"} <= names
    assert not {"cu_seq_lens_k", "max_length_k", "position_ids", "seq_idx"} & names


def test_fla_positional_call():
    """FLA's layers and tests pass the leading arguments by position."""
    q, k = torch.randn(2, 1, 20, 2, 16).unbind()
    v, g, beta = torch.randn(1, 20, 2, 16), F.logsigmoid(torch.randn(1, 20, 2)), torch.rand(1, 20, 2)
    by_name = chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, scale=0.5, use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    by_position = chunk_gated_delta_rule(q, k, v, g, beta, 0.5, None, True, True)
    assert all(map(torch.equal, by_name, by_position))


def test_serving_engine():
    """Prefill two requests into slots of a padded bfloat16 pool [slots, Hv, V, K], then decode a batch with a padding entry."""
    torch.manual_seed(0)
    slots = torch.zeros(6, HEADS_V * V * K + 40, dtype=torch.bfloat16)
    pool = slots[:, : HEADS_V * V * K].view(6, HEADS_V, V, K)
    A_log, dt_bias = torch.rand(HEADS_V), torch.randn(HEADS_V)
    inside = dict(use_qk_l2norm_in_kernel=True, state_v_first=True)

    def tokens(batch, n):
        return (
            torch.randn(batch, n, HEADS, K).bfloat16(),
            torch.randn(batch, n, HEADS, K).bfloat16(),
            torch.randn(batch, n, HEADS_V, V).bfloat16(),
            torch.randn(batch, n, HEADS_V),
            torch.randn(batch, n, HEADS_V).bfloat16(),
        )

    q, k, v, a, b = tokens(1, 100)
    g, beta = -A_log.exp() * F.softplus(a + dt_bias), b.float().sigmoid()
    offsets = torch.tensor([0, 30, 100], dtype=torch.int32)
    no_history = torch.tensor([-1, -1], dtype=torch.int32)
    with torch.inference_mode():
        o = chunk_gated_delta_rule_pool(
            q, k, v, g, beta, pool, no_history, write_rows=torch.tensor([4, 1], dtype=torch.int32), cu_seqlens=offsets, **inside
        )
    truth, final, _ = recurrence(q, k, v, g, beta, l2norm=True, state_v_first=True, cu_seqlens=offsets)
    assert relative_rms(o, truth) < 5e-3 and relative_rms(pool[[4, 1]], final) < 4e-3
    before = pool.clone()
    q, k, v, a, b = tokens(3, 1)
    with torch.inference_mode():
        o = recurrent_gated_delta_rule_pool(
            q, k, v, a, b, pool, torch.tensor([1, -1, 4], dtype=torch.int32), use_gate_in_kernel=True, A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True, **inside,
        )  # fmt: skip
    truth, final, _ = recurrence(q, k, v, a, b, l2norm=True, state_v_first=True, use_gate=True, A_log=A_log, dt_bias=dt_bias,
                                 use_sigmoid=True, initial_state=before[[1, 0, 4]])  # fmt: skip
    assert not o[1].any() and relative_rms(o[[0, 2]], truth[[0, 2]]) < 5e-3 and relative_rms(pool[[1, 4]], final[[0, 2]]) < 4e-3
    assert not slots[:, HEADS_V * V * K :].any() and not pool[[0, 2, 3, 5]].any()


def test_flat_serving_decode_with_offsets():
    """One row of tokens for all requests: [1, N, H, D] and offsets 0, 1, ..., N, as vLLM decodes."""
    torch.manual_seed(0)
    n = 5
    q, k = torch.randn(2, 1, n, HEADS, K).unbind()
    v, g, beta = torch.randn(1, n, HEADS_V, V), -torch.rand(1, n, HEADS_V), torch.rand(1, n, HEADS_V)
    pool = torch.randn(8, HEADS_V, K, V)
    rows = torch.tensor([7, 0, 3, 2, 5])
    flat, batched = pool.clone(), pool.clone()
    o = recurrent_gated_delta_rule_pool(
        q, k, v, g, beta, flat, rows, cu_seqlens=torch.arange(n + 1), use_qk_l2norm_in_kernel=True
    )
    b = recurrent_gated_delta_rule_pool(
        *(x.transpose(0, 1) for x in (q, k, v, g, beta)), batched, rows, use_qk_l2norm_in_kernel=True
    )
    assert torch.equal(o, b.transpose(0, 1)) and torch.equal(flat, batched)
