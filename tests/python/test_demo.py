"""The demo in miniature, as a user runs it, and the plain PyTorch formulation that it measures against."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_qla

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import torch_formulation  # noqa: E402

OPTIONS = {
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def random_inputs(tokens, *, heads_qk=2, heads_v=6, dim_k=8, dim_v=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return {
        "q": random(2, tokens, heads_qk, dim_k),
        "k": random(2, tokens, heads_qk, dim_k),
        "v": random(2, tokens, heads_v, dim_v),
        "g": random(2, tokens, heads_v),
        "beta": random(2, tokens, heads_v),
        "A_log": random(heads_v),
        "dt_bias": random(heads_v),
        "initial_state": random(2, heads_v, dim_k, dim_v),
    }


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 200])
def test_plain_formulation_is_the_recurrence(tokens):
    """Chunked and token by token agree in fp64: o, the final state and every gradient."""
    inputs = random_inputs(tokens)
    results = []
    for operation in (torch_formulation.chunk_gated_delta_rule, torch_formulation.recurrent_gated_delta_rule):
        o, state = operation(**inputs, **OPTIONS)
        weights = torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view_as(o)
        gradients = torch.autograd.grad((o * weights).sum() + state.square().sum(), list(inputs.values()), allow_unused=True)
        results.append([o, state, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)])
    for chunked, recurrent in zip(*results, strict=True):
        torch.testing.assert_close(chunked, recurrent, rtol=1e-10, atol=1e-10)


def test_plain_formulation_under_strong_decay():
    """exp of a positive difference of decays would overflow: it is masked first."""
    inputs = {name: value.detach() for name, value in random_inputs(130).items() if name not in ("A_log", "dt_bias")}
    inputs["g"] = inputs["g"] * 0 - 40.0
    o, state = torch_formulation.chunk_gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True, output_final_state=True)
    expected = torch_formulation.recurrent_gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch.testing.assert_close((o, state), expected, rtol=1e-10, atol=1e-10)


def run_demo(tmp_path, *arguments, **environment):
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "demo/main.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "DEMO_OUT": str(tmp_path / "out"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_demo_smoke(device, tmp_path):
    """Every step runs on a text of one's own; prefill and decode agree; the picture is there."""
    pytest.importorskip("matplotlib")
    if reason := flash_qla.device_support(device):
        pytest.skip(reason)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(4000)))
    result = run_demo(tmp_path, "--smoke", TEXT=str(text), DEVICE=device)
    if "DEVICE=cuda is refused: " in result.stderr and "Traceback" not in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    for number in range(1, 6):
        assert f"[{number}/5]" in result.stdout
    assert "they agree" in result.stdout
    assert "reference implementation" not in result.stderr
    picture = tmp_path / "out" / "demo.png"
    assert str(picture) in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_refuses_what_it_cannot_do(tmp_path):
    """A device without kernels and a text that is too short: one sentence, and no traceback."""
    for device in ("mps",) if torch.cuda.is_available() else ("mps", "cuda"):
        result = run_demo(tmp_path, "--smoke", DEVICE=device)
        assert result.returncode != 0
        assert f"DEVICE={device} is refused: " in result.stderr and "Traceback" not in result.stderr
    short = tmp_path / "short.txt"
    short.write_text("too short")
    result = run_demo(tmp_path, "--smoke", TEXT=str(short))
    assert result.returncode != 0
    assert "the demo needs at least" in result.stderr and "Traceback" not in result.stderr
