"""A small byte-level language model whose mixing layers are gated delta rule layers.

One layer: norm -> projections to q, k, v, an output gate z and, per value head, the raw decay gate a and the raw update
strength b -> short causal convolution over q, k, v -> the operation -> RMS norm per head, times silu(z) -> output projection
-> residual; then an MLP. The L2 normalisation of q and k, the log decay -exp(A_log) softplus(a + dt_bias) and the strength
sigmoid(b) are computed inside the operation.

The operation is an argument: flash_qla, the plain PyTorch formulation, or none of it (o = v), which keeps all else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_formulation
from torch import nn

import flash_qla

BYTES = 256


@dataclass(frozen=True)
class Operation:
    """`chunk` runs whole passages, `step` single tokens; both are called as flash_qla.chunk_gated_delta_rule."""

    name: str
    chunk: Callable
    step: Callable


def output_is_v(q, k, v, **options):
    """What the gated delta rule is replaced by in the comparison: no state, nothing from other positions."""
    return v, options["initial_state"]


def fused_step(q, k, v, **options):
    return flash_qla.fused_recurrent_gated_delta_rule(q, k, v, **options)


FLASH_QLA = Operation("flash_qla", flash_qla.chunk_gated_delta_rule, fused_step)
PYTORCH = Operation("plain PyTorch", torch_formulation.chunk_gated_delta_rule, torch_formulation.recurrent_gated_delta_rule)
NONE = Operation("o = v", output_is_v, output_is_v)


@dataclass(frozen=True)
class Config:
    width: int = 96
    layers: int = 3
    heads_qk: int = 1
    heads_v: int = 2  # grouped value heads: two share each q/k head
    head_dim: int = 64
    mlp: int = 192
    # Tokens that the short convolution sees. Chosen by trial so that the operation has something to do that the convolution
    # cannot: with 4 the model with the operation is as good (2.13 bits per byte in that trial), but the one with o = v has
    # 2.21 in place of 2.37.
    conv: int = 2


class LayerState:
    """What one layer carries from token to token: the last inputs of the convolution and the operation's state."""

    def __init__(self):
        self.conv = None  # [B, conv - 1, channels]
        self.delta = None  # [B, heads_v, head_dim, head_dim] fp32


class GatedDeltaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        keys, values = config.heads_qk * config.head_dim, config.heads_v * config.head_dim
        self.config, self.keys, self.values = config, keys, values
        self.project = nn.Linear(config.width, 2 * keys + 2 * values + 2 * config.heads_v, bias=False)
        self.conv = nn.Parameter(torch.empty(config.conv, 2 * keys + values).uniform_(-1, 1) / config.conv**0.5)
        # Log decays a token from -0.001 to -0.1: heads that remember hundreds of bytes and heads that remember a few.
        self.A_log = nn.Parameter(torch.zeros(config.heads_v))
        start = torch.logspace(-3, -1, config.heads_v)
        self.dt_bias = nn.Parameter(start + torch.log(-torch.expm1(-start)))  # inverse of softplus
        self.norm = nn.Parameter(torch.ones(config.head_dim))
        self.out = nn.Linear(values, config.width, bias=False)

    def convolve(self, x, state):
        """Causal depthwise convolution and silu; x [B,T,channels]."""
        size, tokens = self.config.conv, x.shape[1]
        past = state.conv if state is not None and state.conv is not None else x.new_zeros(x.shape[0], size - 1, x.shape[2])
        x = torch.cat((past, x), 1)
        if state is not None:
            state.conv = x[:, tokens:]
        # As an image of one row whose channels are innermost: PyTorch's fastest depthwise convolution on a CPU.
        image, weight = x.transpose(1, 2)[:, :, None], self.conv.t()[:, None, None]
        return F.silu(F.conv2d(image, weight, groups=x.shape[2])[:, :, 0].transpose(1, 2))

    def forward(self, x, operation, state):
        c = self.config
        parts = (2 * self.keys + self.values, self.values, c.heads_v, c.heads_v)
        qkv, z, a, b = self.project(x).split(parts, -1)
        q, k, v = self.convolve(qkv, state).split((self.keys, self.keys, self.values), -1)
        run = operation.step if state is not None and x.shape[1] == 1 else operation.chunk
        o, final_state = run(
            q.unflatten(-1, (c.heads_qk, c.head_dim)),
            k.unflatten(-1, (c.heads_qk, c.head_dim)),
            v.unflatten(-1, (c.heads_v, c.head_dim)),
            g=a,
            beta=b,
            initial_state=None if state is None else state.delta,
            output_final_state=state is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        if state is not None:
            state.delta = final_state
        o = F.rms_norm(o, (c.head_dim,), self.norm, 1e-5).flatten(-2)
        return self.out(o * F.silu(z))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm_mix, self.norm_mlp = nn.LayerNorm(config.width, bias=False), nn.LayerNorm(config.width, bias=False)
        self.mix = GatedDeltaLayer(config)
        self.up, self.down = nn.Linear(config.width, config.mlp, bias=False), nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x, operation, state):
        x = x + self.mix(self.norm_mix(x), operation, state)
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class ByteModel(nn.Module):
    """tokens [B,T] -> logits [B,T,256] of the next byte. With `states` (of new_states) it goes on from them
    and updates them."""

    def __init__(self, config, operation):
        super().__init__()
        self.config, self.operation = config, operation
        self.embed = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:  # every residual branch starts small
            nn.init.normal_(block.mix.out.weight, std=0.5 * (config.layers * config.heads_v * config.head_dim) ** -0.5)
            nn.init.normal_(block.down.weight, std=0.5 * (config.layers * config.mlp) ** -0.5)

    def new_states(self):
        return [LayerState() for _ in self.blocks]

    def forward(self, tokens, states=None):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, self.operation, None if states is None else states[i])
        return self.head(self.norm(x))
