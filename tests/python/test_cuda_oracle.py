"""The operations on a CUDA device against the independent float64 recurrence and its gradients, for all pairs of options."""

import pytest
import torch
from bounds import assert_close
from on_cuda import expect_taken, moved_all, skip_without_cuda
from problems import TENSORS, all_pairs, for_oracle, make, with_gradients
from recurrence import recurrence, single_precision_error
from test_oracle import OPTIONS as CPU_OPTIONS
from test_oracle import PACKED as CPU_PACKED

from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

skip_without_cuda()

SIZES = {"dim_k": [16, 64, 80, 128], "dim_v": [16, 64, 96, 128]}
PROBLEMS = all_pairs(CPU_OPTIONS | SIZES) + all_pairs(CPU_PACKED | SIZES, seed=1)
EACH_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.seed}-{'packed' if p.lengths else 'dense'}")


def check(problem, operation, function):
    arguments = make(problem)
    got = moved_all(arguments)
    chunked = operation == "chunk_forward"
    expect_taken(got, operation)
    o, final, _ = recurrence(**for_oracle(arguments))
    error = single_precision_error(arguments, o, final) if problem.dtype == torch.float32 else 0.0
    o_got, final_got = function(**got, output_final_state=True)
    assert o_got.is_cuda and final_got.is_cuda
    assert o_got.dtype == problem.dtype and final_got.dtype == torch.float32
    where = "cuda" if chunked else "cpu"
    assert_close("o", o_got.cpu(), o, "o", problem.dtype, error, where=where)
    assert_close("state", final_got.cpu(), final, "state", problem.dtype, error, where=where)


@EACH_PROBLEM
def test_chunks(problem):
    check(problem, "chunk_forward", chunk_gated_delta_rule)


@EACH_PROBLEM
def test_recurrent(problem):
    check(problem, "recurrent_forward", fused_recurrent_gated_delta_rule)


@EACH_PROBLEM
def test_gradients(problem):
    arguments = make(problem)
    expect_taken(moved_all(arguments), "chunk_backward")
    expected = with_gradients(arguments)
    o, final, _ = recurrence(**for_oracle(expected))
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(problem.dtype)
    d_final = torch.randn(final.shape, generator=generator, dtype=torch.float64).to(torch.float32)
    ((o * d_o).sum() + (final * d_final).sum() + 0 * expected["v"].sum()).backward()
    error = single_precision_error(arguments, o, final) if problem.dtype == torch.float32 else 0.0
    got = with_gradients(moved_all(arguments))
    o_got, final_got = chunk_gated_delta_rule(**got, output_final_state=True)
    torch.autograd.backward([o_got, final_got], [d_o.cuda(), d_final.cuda()])
    for name in TENSORS:
        if got.get(name) is not None:
            gradient = got[name].grad
            assert gradient.is_cuda and gradient.dtype == got[name].dtype
            truth = expected[name].grad if expected[name].grad is not None else torch.zeros_like(expected[name])
            kind = "dg" if name == "g" else "gradient"
            assert_close(f"d{name}", gradient.cpu(), truth, kind, problem.dtype, error, where="cuda")
