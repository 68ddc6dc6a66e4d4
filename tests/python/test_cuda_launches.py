"""D03, D04: how many kernels a call launches, and that it copies nothing, waits for nothing and asks the device for no memory.

The counts are upper bounds, from the tables of kernels in docs/design/*_cuda.md: they depend on the operation and its options
alone, never on how many tokens, sequences and heads there are, nor on lengths.
"""

import dataclasses

import pytest
import torch
from on_cuda import expect_taken, moved_all, skip_without_cuda
from problems import TENSORS, Problem, make, with_gradients
from profiled import record, unseen

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

skip_without_cuda()

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FEW = Problem(batch=2, tokens=96, heads_qk=2, heads_v=4, dim_k=64, dim_v=64)
MANY = dataclasses.replace(FEW, batch=40, tokens=130, heads_qk=4, heads_v=8)
PROBLEMS = {
    "dense": [FEW, MANY],
    "packed": [
        dataclasses.replace(FEW, batch=1, lengths=(100, 50), slack=20),
        dataclasses.replace(MANY, batch=1, lengths=(0, *range(1, 79, 2), 500), slack=3),
    ],
}
EACH_DTYPE = pytest.mark.parametrize("dtype", [BF16, F16, F32])
DENSE_AND_PACKED = pytest.mark.parametrize("kind", PROBLEMS)


@pytest.fixture(scope="module")
def seeing():
    if reason := unseen():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _calls_alone(seeing, monkeypatch):
    monkeypatch.delenv("FLASHQLA_CUDA_CHECK", raising=False)  # which reads indices on the host


def check(call, kernels, fills=0):
    """Of a call whose memory torch has already."""
    for _ in range(2):
        call()
    seen = record(call)
    assert 1 <= len(seen.kernels) <= kernels, seen.kernels
    assert len(seen.fills) <= fills, seen.fills
    assert not seen.copies and not seen.waits and not seen.allocations, seen


def arguments_of(kind, dtype, **options):
    """For each problem of that kind, small and larger."""
    for problem in PROBLEMS[kind]:
        yield moved_all(make(dataclasses.replace(problem, dtype=dtype, **options)))


@EACH_DTYPE
@DENSE_AND_PACKED
def test_chunks(kind, dtype):
    """prepare_chunks and advance_states; before them make_schedule for a pack. As many while gradients are recorded."""
    table = int(kind == "packed")
    for a in arguments_of(kind, dtype, gate="computed", beta="sigmoid"):
        expect_taken(a, "chunk_forward")
        check(lambda a=a: chunk_gated_delta_rule(**a, output_final_state=True), 2 + table)
        leaves = with_gradients(a)
        check(lambda a=leaves: chunk_gated_delta_rule(**a, output_final_state=True), 2 + table)


@DENSE_AND_PACKED
def test_the_low_level_forward(kind):
    """write_extras besides."""
    for a in arguments_of(kind, BF16, l2norm=False):
        call = {name: a[name] for name in ("q", "k", "v", "g", "beta", "initial_state")} | {"cu_seqlens": a.get("cu_seqlens")}
        check(lambda call=call: chunk_gated_delta_rule_fwd(**call, output_h=True), 3 + (kind == "packed"))


@EACH_DTYPE
@DENSE_AND_PACKED
@pytest.mark.parametrize("gate", ["log", "computed"])
def test_backward(kind, dtype, gate):
    """prepare_chunks, states_both_ways, chunk_gradients, add_head_sums for a gate computed inside; with f32 these for each half
    of the q/k heads. Before them make_schedule for a pack; a row of zeros where o has no gradient."""
    most = (3 + (gate == "computed")) * (2 if dtype == F32 else 1) + (kind == "packed")
    for a in arguments_of(kind, dtype, gate=gate):
        expect_taken(a, "chunk_backward")
        leaves = with_gradients(a)
        wanted = [leaves[name] for name in TENSORS if leaves.get(name) is not None]
        o, state = chunk_gated_delta_rule(**leaves, output_final_state=True)
        d_o, d_state = torch.randn_like(o), torch.randn_like(state)

        def both(o=o, state=state, wanted=wanted, given=(d_o, d_state)):
            return torch.autograd.grad([o, state], wanted, given, retain_graph=True)

        def state_alone(state=state, wanted=wanted, given=d_state):
            return torch.autograd.grad(state, wanted, given, retain_graph=True)

        check(both, most)
        check(state_alone, most, fills=1)


@EACH_DTYPE
@DENSE_AND_PACKED
def test_recurrent(kind, dtype):
    """One kernel, packs too."""
    for a in arguments_of(kind, dtype, gate="computed", beta="sigmoid"):
        check(lambda a=a: fused_recurrent_gated_delta_rule(**a, output_final_state=True), 1)


@DENSE_AND_PACKED
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_pools(kind, index_dtype):
    """As without one; with states after every 64 tokens there is a schedule without a pack too."""
    for a in arguments_of(kind, BF16, state_dtype=None, index_dtype=index_dtype):
        sequences = a["q"].shape[0] if kind == "dense" else len(a["cu_seqlens"]) - 1
        heads, tokens = a["v"].shape[2], a["q"].shape[0] * a["q"].shape[1]
        rows = torch.arange(sequences, device="cuda", dtype=index_dtype)
        pool = {"state_pool": torch.zeros(sequences, heads, 64, 64, device="cuda"), "read_rows": rows}
        check(lambda a=a | pool: chunk_gated_delta_rule_pool(**a), 2 + (kind == "packed"))
        check(lambda a=a | pool: recurrent_gated_delta_rule_pool(**a), 1)
        places = tokens // 64 + sequences
        kept = {"states_every": 64, "checkpoints": torch.zeros(places, heads, 64, 64, device="cuda")}
        check(lambda a=a | pool | kept: chunk_gated_delta_rule_pool(**a), 3)


def test_rows_that_are_copied_first():
    """q, k and v whose last dimension is not contiguous: a kernel of torch's for each."""
    a = moved_all(make(Problem(tokens=192, dim_k=64, dim_v=64, strides="last", dtype=BF16)))
    check(lambda: chunk_gated_delta_rule(**a), 2 + 3)
