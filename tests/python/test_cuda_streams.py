"""Calls on a CUDA device as work on a stream: side streams, graphs, another device, the autograd thread, nothing that waits."""

from pathlib import Path

import pytest
import torch
from on_cuda import copy_into, expect_taken, moved, moved_all, skip_without_cuda
from problems import Problem, make, with_gradients
from processes import run_python

import flash_qla
from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

skip_without_cuda()

BF16 = torch.bfloat16
BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
PACKAGES = str(Path(flash_qla.__file__).parents[1])
CYCLES = 100_000_000  # of a kernel that only waits: about 50 ms


def packed(lengths, seed=0):
    """192 rows in all, some of them past the last offset."""
    return make(Problem(lengths=lengths, slack=192 - sum(lengths), dim_k=64, dim_v=64, dtype=BF16, seed=seed))


@BOTH
def test_side_stream(function):
    """Inputs appear on a side stream only after a while: a call there that was put anywhere else would read the old ones."""
    old, new = moved_all(packed((100, 50))), moved_all(packed((20, 130), seed=1))
    expected = function(**new)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        copy_into(old, new)
        o = function(**old)[0]
    assert not stream.query()  # the call did not wait
    stream.synchronize()
    assert torch.equal(o, expected)


@BOTH
def test_graph_with_other_contents(function):
    """A replay with other sequences and data equals an eager call."""
    arguments = moved_all(packed((100, 50)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = function(**arguments, output_final_state=True)
    for seed, lengths in enumerate([(100, 50), (0, 192), (1, 1), (70, 64)]):
        new = moved_all(packed(lengths, seed))
        copy_into(arguments, new)
        o.fill_(float("nan"))
        graph.replay()
        o_eager, state_eager = function(**new, output_final_state=True)
        assert torch.equal(o, o_eager) and torch.equal(state, state_eager)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule_pool, recurrent_gated_delta_rule_pool])
def test_graph_of_a_pool(function):
    """Rows and pool change between replays; every replay updates the pool in place."""
    arguments = moved_all(make(Problem(batch=3, tokens=2, dim_k=64, dim_v=64, dtype=BF16, state_dtype=None)))
    pool = torch.randn(6, 2, 64, 64, device="cuda")
    rows = torch.tensor([0, 1, 2], device="cuda")
    eager_pool = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = function(**arguments, state_pool=pool, read_rows=rows)
    for new_rows in ([0, 1, 2], [5, -1, 0], [3, 4, 1]):
        rows.copy_(torch.tensor(new_rows))
        graph.replay()
        assert torch.equal(o, function(**arguments, state_pool=eager_pool, read_rows=rows))
        assert torch.equal(pool, eager_pool)


FIRST_CALL = """
    import sys, torch, flash_qla
    assert not torch.cuda.is_initialized()
    torch.manual_seed(0)
    function = getattr(flash_qla, sys.argv[1])
    q, k, v = torch.randn(3, 1, 192, 2, 64, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(1, 192, 2, device="cuda"), torch.rand(1, 192, 2, device="cuda")
    offsets = torch.tensor([0, 100, 150], device="cuda")
    options = {"beta": beta, "cu_seqlens": offsets, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = function(q, k, v, g, **options)
    for new in ([0, 100, 150], [0, 0, 192]):
        offsets.copy_(torch.tensor(new))
        graph.replay()
        o_eager, state_eager = function(q, k, v, g, **options)
        print(torch.equal(o, o_eager), torch.equal(state, state_eager))
"""


@BOTH
def test_the_first_call_of_a_process_is_captured(function):
    assert run_python(FIRST_CALL, function.__name__, PYTHONPATH=PACKAGES).split() == ["True"] * 4


FORK = """
    import os, torch, flash_qla
    child = os.fork()
    if child == 0:
        x = torch.zeros(1, 4, 1, 16, device="cuda", dtype=torch.bfloat16)
        o, _ = flash_qla.chunk_gated_delta_rule(x, x, x, None, None)
        os._exit(0 if not o.any() else 1)
    print(os.waitpid(child, 0)[1])
"""


def test_a_process_may_fork_after_the_import():
    assert run_python(FORK, PYTHONPATH=PACKAGES).split() == ["0"]


def test_nothing_waits():
    """Torch raises at whatever of its own would make the host wait; a queue with work in it stays."""
    arguments = moved_all(packed((100, 50)))
    pool = {name: x for name, x in arguments.items() if name != "initial_state"} | {
        "state_pool": torch.zeros(4, 2, 64, 64, device="cuda"),
        "read_rows": torch.tensor([1, 2], device="cuda"),
    }
    transposed = arguments | {"q": moved(make(Problem(tokens=192, dim_k=64, strides="last", dtype=BF16))["q"])}
    calls = [
        lambda: chunk_gated_delta_rule(**arguments),
        lambda: chunk_gated_delta_rule(**transposed),
        lambda: chunk_gated_delta_rule(**with_gradients(arguments)),
        lambda: fused_recurrent_gated_delta_rule(**arguments),
        lambda: chunk_gated_delta_rule_pool(**pool),
        lambda: recurrent_gated_delta_rule_pool(**pool),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            torch.cuda._sleep(CYCLES)
            result = call()
            assert not torch.cuda.current_stream().query()
            del result
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@BOTH
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(function):
    arguments = packed((100, 50))
    expected = function(**moved_all(arguments, "cuda:0"))[0]
    other = moved_all(arguments, "cuda:1")
    with torch.cuda.device(0):
        stream = torch.cuda.Stream("cuda:1")
        with torch.cuda.stream(stream):
            torch.cuda.set_device(0)
            o = function(**other)[0]
            assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert o.device == torch.device("cuda:1") and torch.equal(o.cpu(), expected.cpu())


@BOTH
def test_repeats_are_equal_and_packs_do_not_matter(function):
    """Bit for bit: once more, and the second sequence of the pack alone."""
    arguments = moved_all(packed((100, 50)))
    o, state = function(**arguments, output_final_state=True)
    again, state_again = function(**arguments, output_final_state=True)
    assert torch.equal(o, again) and torch.equal(state, state_again)
    alone = {name: x[:, 100:150] if name in ("q", "k", "v", "g", "beta") else x for name, x in arguments.items()}
    alone |= {"cu_seqlens": None, "initial_state": arguments["initial_state"][1:]}
    o_alone, state_alone = function(**alone, output_final_state=True)
    assert torch.equal(o[:, 100:150], o_alone) and torch.equal(state[1:], state_alone)


def test_backward_on_the_stream_of_its_forward():
    """Autograd runs it on a thread of its own, on the stream of the forward: the same gradients as on the default stream."""
    arguments = moved_all(packed((100, 50)))
    expect_taken(arguments, "chunk_backward")
    eager = with_gradients(arguments)
    chunk_gated_delta_rule(**eager)[0].float().square().sum().backward()
    torch.cuda.synchronize()
    stream, late = torch.cuda.Stream(), with_gradients(arguments)
    with torch.cuda.stream(stream):
        o = chunk_gated_delta_rule(**late)[0]
        loss = o.float().square().sum()
        torch.cuda._sleep(CYCLES)
        loss.backward()
    torch.cuda.synchronize()
    for name, x in eager.items():
        if isinstance(x, torch.Tensor) and x.grad is not None:
            assert torch.equal(x.grad, late[name].grad), name


@BOTH
def test_compiled(function):
    """Without graph breaks, with sizes that change; the fake kernels ask the device's library."""
    torch._dynamo.reset()

    def twice(**arguments):
        o, state = function(**arguments, output_final_state=True)
        return o * 2, state

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (70, 33, 129):
        arguments = moved_all(make(Problem(tokens=tokens, dtype=BF16, seed=tokens)))
        for got, expected in zip(compiled(**arguments), twice(**arguments), strict=True):
            assert got.is_cuda and torch.equal(got, expected)
