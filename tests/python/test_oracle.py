"""Every implementation against the independent float64 recurrence and its gradients by autograd, for all pairs of options."""

import pytest
import torch
from bounds import assert_close, relative_rms
from conftest import implementations
from problems import TENSORS, Problem, all_pairs, for_oracle, make, with_gradients
from recurrence import recurrence, single_precision_error

from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

OPTIONS = {
    "batch": [1, 2],
    "tokens": [0, 1, 5, 63, 64, 65, 130],
    "heads_qk": [1, 2],
    "heads_v": [2, 4, 8],
    "dim_k": [16, 33, 64],
    "dim_v": [8, 48, 64],
    "dtype": [F32, BF16, F16],
    "small_dtype": [F32, BF16, F16],
    "gate": ["none", "log", "strong", "computed", "computed_without_bias"],
    "beta": ["one", "given", "sigmoid", "doubled"],
    "l2norm": [True, False],
    "state_dtype": [None, F32, BF16, F16],
    "state_v_first": [False, True],
    "scale": [None, 0.0, 0.3],
    "strides": ["dense", "fused", "transposed", "expanded", "last"],
}
PACKED = {name: values for name, values in OPTIONS.items() if name not in ("batch", "tokens")} | {
    "lengths": [(0, 1, 64, 65), (70, 0, 0, 3), (5,), (0, 0)],
    "slack": [0, 3],
    "index_dtype": [torch.int32, torch.int64],
}
PROBLEMS = all_pairs(OPTIONS) + all_pairs(PACKED, seed=1)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.seed}-{'packed' if p.lengths else 'dense'}")
def test_chunks_and_gradients(problem, force):
    arguments = make(problem)
    expected = with_gradients(arguments)
    o, final, _ = recurrence(**for_oracle(expected))
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator, dtype=F64).to(problem.dtype)
    d_final = torch.randn(final.shape, generator=generator, dtype=F64).to(F32)
    (
        (o * d_o).sum() + (final * d_final).sum() + 0 * expected["v"].sum()
    ).backward()  # without a token nothing else asks for a gradient
    error = single_precision_error(arguments, o, final) if problem.dtype == F32 else 0.0
    for implementation in implementations("chunk_backward"):
        force(implementation)
        got = with_gradients(arguments)
        o_got, final_got = chunk_gated_delta_rule(**got, output_final_state=True)
        torch.autograd.backward([o_got, final_got], [d_o, d_final])
        assert o_got.dtype == problem.dtype and final_got.dtype == F32
        assert_close(f"{implementation} o", o_got, o, "o", problem.dtype, error)
        assert_close(f"{implementation} state", final_got, final, "state", problem.dtype, error)
        for name in TENSORS:
            if got.get(name) is not None:
                gradient = got[name].grad
                assert gradient.dtype == got[name].dtype
                truth = expected[name].grad if expected[name].grad is not None else torch.zeros_like(gradient)  # no token, no use
                kind = "dg" if name == "g" else "gradient"
                assert_close(f"{implementation} d{name}", gradient, truth, kind, problem.dtype, error)


@pytest.mark.parametrize("problem", PROBLEMS[::2], ids=lambda p: f"{p.seed}-{'packed' if p.lengths else 'dense'}")
def test_recurrent(problem, force):
    arguments = make(problem)
    o, final, _ = recurrence(**for_oracle(arguments))
    error = single_precision_error(arguments, o, final) if problem.dtype == F32 else 0.0
    for implementation in implementations("recurrent_forward"):
        force(implementation)
        o_got, final_got = fused_recurrent_gated_delta_rule(**arguments, output_final_state=True)
        assert_close(f"{implementation} o", o_got, o, "o", problem.dtype, error)
        assert_close(f"{implementation} state", final_got, final, "state", problem.dtype, error)


@pytest.mark.parametrize("gate", ["strong", "computed"])
@pytest.mark.parametrize("beta", ["given", "doubled"])
def test_float64_reference_is_exact(gate, beta):
    """float64 is not a fallback: results agree with the recurrence to the last digits."""
    problem = Problem(dtype=F64, small_dtype=F64, state_dtype=F64, gate=gate, beta=beta)
    arguments = make(problem)
    got, expected = with_gradients(arguments), with_gradients(arguments)
    o, final = chunk_gated_delta_rule(**got, output_final_state=True)
    o_expected, final_expected, _ = recurrence(**for_oracle(expected))
    assert o.dtype == final.dtype == F64
    (o.sum() + final.square().sum()).backward()
    (o_expected.sum() + final_expected.square().sum()).backward()
    assert relative_rms(o, o_expected) < 1e-14 and relative_rms(final, final_expected) < 1e-14
    for name in TENSORS:
        if got.get(name) is not None:
            assert relative_rms(got[name].grad, expected[name].grad) < 1e-12, name


def test_no_wanted_state_is_none():
    assert chunk_gated_delta_rule(**make(Problem()))[1] is None
    assert fused_recurrent_gated_delta_rule(**make(Problem()))[1] is None
