"""A layer that mixes tokens with the gated delta rule, trained to recall.

Gate, update strength and normalisation are computed inside the operation. A key is the token before its value, so a query finds
what followed the last time its token was seen.
"""

import torch
from torch import nn

import flash_qla


class DeltaMixer(nn.Module):
    def __init__(self, width, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(width, 3 * heads * dim, bias=False)
        self.gates = nn.Linear(width, 2 * heads, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-4.0, 0.0, heads))  # slow heads remember long, fast ones forget soon
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.dim)).unbind(2)
        k = nn.functional.pad(k, (0, 0, 0, 0, 1, -1))  # one token later
        g, beta = self.gates(x).chunk(2, dim=-1)
        o, _ = flash_qla.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        return self.out(o.flatten(2))


torch.manual_seed(0)
torch.set_num_threads(2)
vocabulary, width, tokens = 16, 64, 64
embed, mixer = nn.Embedding(vocabulary, width), DeltaMixer(width, heads=2, dim=32)
head = nn.Linear(width, vocabulary)
optimizer = torch.optim.AdamW([*embed.parameters(), *mixer.parameters(), *head.parameters()], lr=5e-3)

# Each sequence repeats a random pattern of 8 symbols. Which symbol comes next follows only from what was seen 8 tokens ago.
losses = []
for _ in range(60):
    pattern = torch.randint(vocabulary, (16, 8))
    text = pattern.repeat(1, tokens // 8 + 1)[:, : tokens + 1]
    x = embed(text[:, :-1])
    loss = nn.functional.cross_entropy(head(x + mixer(x)).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.8 * losses[0]
