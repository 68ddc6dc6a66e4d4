"""Serving: two sequences prefilled into slots of a state pool, then decoded in place, with drafts of which some are rejected."""

import torch

import flash_qla

torch.manual_seed(0)
heads, dim, slots = 2, 64, 8
pool = torch.zeros(slots, heads, dim, dim)  # the states of everybody who is being served


def inputs(batch, tokens):
    q, k, v = torch.randn(3, batch, tokens, heads, dim).unbind(0)
    return q, k, v, -0.1 * torch.rand(batch, tokens, heads), torch.rand(batch, tokens, heads)


# Prefill: prompts of 70 and 30 tokens, packed one after the other, from zero into slots 2 and 5.
prompts = inputs(1, 100)
flash_qla.chunk_gated_delta_rule_pool(
    *prompts,
    pool,
    torch.tensor([-1, -1]),
    write_rows=torch.tensor([2, 5]),
    cu_seqlens=torch.tensor([0, 70, 100]),
    use_qk_l2norm_in_kernel=True,
)

# Decode: one token for each, slots 2 and 5 in place.
mine = torch.tensor([2, 5])
token = inputs(2, 1)
flash_qla.recurrent_gated_delta_rule_pool(*token, pool, mine, use_qk_l2norm_in_kernel=True)

# A draft of three tokens each: the state after every token is kept in slots of its own, 2 and 5 stay as they are.
draft, draft_slots = inputs(2, 3), torch.tensor([[0, 1, 3], [4, 6, 7]])
flash_qla.recurrent_gated_delta_rule_pool(
    *draft, pool, mine, write_rows=torch.tensor([-1, -1]), token_rows=draft_slots, use_qk_l2norm_in_kernel=True
)

# One token of the first draft was accepted, all three of the second: go on from there, no state is copied.
following = inputs(2, 1)
o = flash_qla.recurrent_gated_delta_rule_pool(
    *following, pool, draft_slots, accepted=torch.tensor([1, 3]), token_rows=mine[:, None], use_qk_l2norm_in_kernel=True
)

# The same for the first sequence as one call over everything that it has kept.
whole = [torch.cat([p[:, :70], t[:1], d[:1, :1], f[:1]], 1) for p, t, d, f in zip(prompts, token, draft, following, strict=True)]
expected, state = flash_qla.chunk_gated_delta_rule(*whole, output_final_state=True, use_qk_l2norm_in_kernel=True)
error = max(((o[0] - expected[0, -1:]).norm() / o[0].norm()).item(), ((pool[2] - state[0]).norm() / state.norm()).item())
print(f"prefill + decode + accepted drafts differ from the whole by {error:.1e}")
assert error < 1e-5
