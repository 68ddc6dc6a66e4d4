"""The shortest use: one call over a whole sequence."""

import torch

import flash_qla

q, k = torch.randn(2, 1, 100, 4, 64).unbind(0)  # [batch, tokens, heads, dim]
v = torch.randn(1, 100, 8, 64)  # twice as many value heads: two of them share each q/k head
g = -0.1 * torch.rand(1, 100, 8)  # natural logarithm of the decay
beta = torch.rand(1, 100, 8)  # how much of each token's error is written

o, state = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
print("o", tuple(o.shape), "state", tuple(state.shape))
