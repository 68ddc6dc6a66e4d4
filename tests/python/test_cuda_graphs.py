"""CUDA graphs of more than one call: two streams in one graph, training steps, the first calls of a process."""

from pathlib import Path

import pytest
import torch
from on_cuda import copy_into, expect_taken, moved_all, skip_without_cuda
from problems import TENSORS, Problem, make, with_gradients
from processes import run_python

import flash_qla
from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

skip_without_cuda()

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EACH_DTYPE = pytest.mark.parametrize("dtype", [BF16, F16, F32])
PACKAGES = str(Path(flash_qla.__file__).parents[1])
ROWS = 192
LENGTHS = [(100, 50), (0, ROWS), (1, 1), (70, 64)]  # the first are those of the capture
GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")


def packed(lengths, seed, dtype):
    return moved_all(make(Problem(lengths=lengths, slack=ROWS - sum(lengths), dim_k=64, dim_v=64, dtype=dtype, seed=seed)))


def prefill_then_again(a):
    """The second call starts from the first one's states."""
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    return o, state, *fused_recurrent_gated_delta_rule(**a | {"initial_state": state}, output_final_state=True)


def steps_then_chunks(a):
    return *fused_recurrent_gated_delta_rule(**a, output_final_state=True), *chunk_gated_delta_rule(**a, output_final_state=True)


def training_step(a):
    """Results and gradients; those of the results are the results."""
    leaves = with_gradients(a)
    results = chunk_gated_delta_rule(**leaves, output_final_state=True)
    gradients = torch.autograd.grad(results, [leaves[name] for name in GRADIENTS], [x.detach() for x in results])
    return *(x.detach() for x in results), *gradients


def captured(calls):
    """A graph in which each call has a stream of its own, forked from that of the capture and joined with it; results."""
    graph = torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream() for _ in calls]
    results = []
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream()
        fork = origin.record_event()
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_event(fork)
            with torch.cuda.stream(stream):
                results.append(call())
        for stream in streams:
            origin.wait_event(stream.record_event())
    return graph, results


@EACH_DTYPE
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_two_streams_in_one_graph(dtype, training):
    """Every replay equals eager calls bit for bit: with the contents of the capture, then with other sequences and data."""
    first, second = (packed(LENGTHS[0], seed, dtype) for seed in (0, 1))
    functions = (training_step, prefill_then_again) if training else (prefill_then_again, steps_then_chunks)
    expect_taken(first, "chunk_backward" if training else "chunk_forward")
    graph, results = captured([lambda: functions[0](first), lambda: functions[1](second)])
    for seed, lengths in enumerate(LENGTHS):
        new = [packed(lengths, 2 * seed, dtype), packed(LENGTHS[seed - 1], 2 * seed + 1, dtype)]
        for old, contents in zip((first, second), new, strict=True):
            copy_into(old, contents)
        for x in (*results[0], *results[1]):
            x.fill_(float("nan"))
        graph.replay()
        for function, contents, got in zip(functions, new, results, strict=True):
            for place, (x, expected) in enumerate(zip(got, function(contents), strict=True)):
                assert torch.equal(x, expected), (function.__name__, place, lengths)


@EACH_DTYPE
@pytest.mark.parametrize("gate", ["log", "computed"])
def test_a_training_step_with_other_contents(dtype, gate):
    """Forward and backward in one graph, the latter put there by autograd's thread; a computed gate adds sums over heads."""

    def problem(lengths, seed):
        slack = ROWS - sum(lengths)
        return moved_all(make(Problem(lengths=lengths, slack=slack, gate=gate, beta="sigmoid", dtype=dtype, seed=seed)))

    def step(a):
        leaves = with_gradients(a)
        wanted = [leaves[name] for name in TENSORS if leaves.get(name) is not None]
        o, state = chunk_gated_delta_rule(**leaves, output_final_state=True)
        return torch.autograd.grad([o, state], wanted, [o.detach(), state.detach()])

    arguments = problem(LENGTHS[0], 0)
    expect_taken(arguments, "chunk_backward")
    graph, (results,) = captured([lambda: step(arguments)])
    for seed, lengths in enumerate(LENGTHS):
        new = problem(lengths, seed)
        copy_into(arguments, new)
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        for place, (x, expected) in enumerate(zip(results, step(new), strict=True)):
            assert torch.equal(x, expected), (place, lengths)


FIRST_CALLS = """
    import sys, torch, flash_qla
    kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    assert not torch.cuda.is_initialized()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 192, 2, 64, device="cuda").to(dtype)
    g, beta = -torch.rand(1, 192, 2, device="cuda"), torch.rand(1, 192, 2, device="cuda")
    offsets = torch.tensor([0, 100, 150], device="cuda")
    options = {"cu_seqlens": offsets, "use_qk_l2norm_in_kernel": True}
    rows = torch.tensor([3, 1], device="cuda")
    pool, eager_pool = torch.zeros(2, 4, 2, 64, 64, device="cuda")

    def training(pool):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        o, _ = flash_qla.chunk_gated_delta_rule(*leaves, **options)
        return o.detach(), *torch.autograd.grad(o, leaves, q)

    def pools(pool):
        call = {"state_pool": pool, "read_rows": rows, **options}
        o = flash_qla.chunk_gated_delta_rule_pool(q, k, v, g, beta, **call)
        return o, flash_qla.recurrent_gated_delta_rule_pool(q, k, v, g, beta, **call), pool

    call = {"training": training, "pools": pools}[kind]
    if kind == "training":  # torch's threads for it are not ours to start in a capture
        x = torch.ones(1, device="cuda", requires_grad=True)
        (2 * x).backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(pool)
    for new in ([0, 100, 150], [0, 0, 192]):
        offsets.copy_(torch.tensor(new))
        graph.replay()
        print(all(map(torch.equal, results, call(eager_pool))))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["training", "pools"])
def test_D02_the_first_calls_of_a_process_are_captured(kind, dtype):
    """Nothing is compiled, tuned or made ready at a first call, so it needs no warm-up; nor do other lengths."""
    assert run_python(FIRST_CALLS, kind, dtype, PYTHONPATH=PACKAGES).split() == ["True"] * 2
