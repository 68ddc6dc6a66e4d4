"""How far a result may be from the truth: the project's one tolerance file, read as the C++ tests read it."""

import json
from pathlib import Path

import torch

_TOLERANCES = json.loads((Path(__file__).parents[1] / "cases" / "tolerances.json").read_text())
_COARSENESS = {torch.float64: 0, torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def relative_rms(x, truth) -> float:
    """Root of the mean square of the difference, relative to that of the truth (absolute where the truth is zero)."""
    x, truth = x.detach().double().flatten(), truth.detach().double().flatten()
    assert x.shape == truth.shape
    if not torch.isfinite(x).all():
        return float("inf")
    difference = (x - truth).square().sum()
    if difference == 0:
        return 0.0
    norm = truth.square().sum()
    return float((difference / (norm if norm > 0 else x.numel())).sqrt())


def bound(kind: str, problem_dtype, result_dtype, recurrence_error: float = 0.0, where: str = "cpu") -> float:
    """kind: o, state, gradient or dg. recurrence_error: that of the token recurrence in float32 on the same inputs.
    where: cuda for the chunked operation on a CUDA device."""
    coarsest = max(problem_dtype, result_dtype, key=_COARSENESS.__getitem__)
    if _COARSENESS[coarsest] == 0:
        smallest = _TOLERANCES["fp32.smallest_of_chunks_on_cuda" if where == "cuda" else "fp32.smallest"]
        limit = max(smallest, _TOLERANCES["fp32.recurrence_factor"] * recurrence_error)
        return limit * _TOLERANCES["fp32.gradient_factor"] if kind in ("gradient", "dg") else limit
    name = {"o": "bf16.o", "state": "bf16.state", "gradient": "bf16.gradient", "dg": "bf16.d_g_of_a_head"}[kind]
    return _TOLERANCES[name] * (_TOLERANCES["fp16.share_of_bf16"] if coarsest == torch.float16 else 1)


def assert_close(name: str, x, truth, kind: str, problem_dtype, recurrence_error: float = 0.0, where: str = "cpu") -> None:
    limit = bound(kind, problem_dtype, x.dtype, recurrence_error, where)
    pairs = [(x, truth)] if kind != "dg" else [(x[..., h], truth[..., h]) for h in range(x.shape[-1])]
    for part, (a, b) in enumerate(pairs):
        error = relative_rms(a, b)
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g}" + (f" in head {part}" if kind == "dg" else "")
