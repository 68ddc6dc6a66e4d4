"""Random problems for the tests, and all pairs of options."""

import dataclasses
import itertools
import random

import torch


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. `lengths` not None: packed, that many tokens a sequence and `slack` rows past the last."""

    batch: int = 1
    tokens: int = 70
    lengths: tuple | None = None
    slack: int = 0
    heads_qk: int = 1
    heads_v: int = 2
    dim_k: int = 16
    dim_v: int = 16
    dtype: torch.dtype = torch.float32
    small_dtype: torch.dtype = torch.float32  # of g, beta, A_log, dt_bias
    gate: str = "log"  # none, log, strong, computed, computed_without_bias
    beta: str = "given"  # one, given, sigmoid, doubled
    l2norm: bool = True
    state_dtype: torch.dtype | None = torch.float32  # None: no initial state
    state_v_first: bool = False
    scale: float | None = None
    strides: str = "dense"  # dense, fused, transposed, expanded, last
    index_dtype: torch.dtype = torch.int64
    seed: int = 0


def all_pairs(options: dict[str, list], seed: int = 0) -> list[Problem]:
    """Problems that together contain every pair of two options' values."""
    names = list(options)
    missing = set()
    for a, b in itertools.combinations(names, 2):
        missing |= {((a, x), (b, y)) for x in options[a] for y in options[b]}
    source = random.Random(seed)
    chosen = []
    while missing:
        best, covered = None, set()
        pair = source.choice(sorted(missing, key=repr))
        for _ in range(30):
            candidate = {name: source.choice(values) for name, values in options.items()} | dict(pair)
            pairs = set(itertools.combinations(candidate.items(), 2)) & missing
            if len(pairs) > len(covered):
                best, covered = candidate, pairs
        missing -= covered
        chosen.append(Problem(**best, seed=len(chosen)))
    return chosen


def _with_strides(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values in other strides."""
    if strides == "transposed":  # [B, H, T, D] in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "expanded":  # heads share memory
        return x[:, :, :1].contiguous().expand_as(x)
    if strides == "last" and x.dim() == 4:  # as after a causal convolution: tokens are contiguous
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return x


def make(p: Problem) -> dict:
    """Keyword arguments of chunk_gated_delta_rule. Gradients wanted by no tensor yet."""
    generator = torch.Generator().manual_seed(p.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    tokens = p.tokens if p.lengths is None else sum(p.lengths) + p.slack
    head = (p.batch, tokens, p.heads_v)
    q, k = normal(p.batch, tokens, p.heads_qk, p.dim_k), normal(p.batch, tokens, p.heads_qk, p.dim_k)
    v = normal(*head, p.dim_v)
    if not p.l2norm:  # beta |k|^2 <= 2 keeps the recurrence from growing
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    arguments = {"q": q.to(p.dtype), "k": k.to(p.dtype), "v": v.to(p.dtype)}
    if p.strides == "fused":
        widths = [p.heads_qk * p.dim_k, p.heads_qk * p.dim_k, p.heads_v * p.dim_v]
        parts = torch.cat([arguments[name].flatten(2) for name in "qkv"], dim=2).split(widths, dim=2)
        sizes = [(p.heads_qk, p.dim_k), (p.heads_qk, p.dim_k), (p.heads_v, p.dim_v)]
        arguments = {name: part.unflatten(2, size) for name, part, size in zip("qkv", parts, sizes, strict=True)}
    gates = {"none": None, "log": uniform(-1, 0, *head), "strong": uniform(-20, 0, *head)}
    g = gates[p.gate] if p.gate in gates else 2 * normal(*head)
    beta = {"one": None, "given": uniform(0, 1, *head)}.get(p.beta, normal(*head))
    arguments |= {"g": None if g is None else g.to(p.small_dtype), "beta": None if beta is None else beta.to(p.small_dtype)}
    for name in arguments:
        if arguments[name] is not None:
            arguments[name] = _with_strides(arguments[name], p.strides)
    arguments["use_qk_l2norm_in_kernel"] = p.l2norm
    if p.gate.startswith("computed"):
        arguments |= {"use_gate_in_kernel": True, "A_log": uniform(-1, 1, p.heads_v).to(p.small_dtype)}
        if p.gate == "computed":
            arguments["dt_bias"] = normal(p.heads_v).to(p.small_dtype)
    if p.beta in ("sigmoid", "doubled"):
        arguments |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": p.beta == "doubled"}
    if p.lengths is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(p.lengths)], dtype=p.index_dtype)
    if p.state_dtype is not None:
        sequences = p.batch if p.lengths is None else len(p.lengths)
        sizes = (p.dim_v, p.dim_k) if p.state_v_first else (p.dim_k, p.dim_v)
        arguments["initial_state"] = normal(sequences, p.heads_v, *sizes).to(p.state_dtype)
    return arguments | {"scale": p.scale, "state_v_first": p.state_v_first}


TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def for_oracle(arguments: dict) -> dict:
    """The same call for recurrence.recurrence."""
    names = {
        "use_qk_l2norm_in_kernel": "l2norm",
        "use_gate_in_kernel": "use_gate",
        "use_beta_sigmoid_in_kernel": "use_sigmoid",
        "allow_neg_eigval": "doubled",
    }
    return {names.get(name, name): value for name, value in arguments.items()}


def with_gradients(arguments: dict) -> dict:
    """A copy whose floating-point tensors are leaves that want a gradient (strides kept)."""
    return {
        name: value.detach().requires_grad_() if name in TENSORS and value is not None else value
        for name, value in arguments.items()
    }
