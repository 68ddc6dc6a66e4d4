"""A16 and side streams, with the backward: it runs on a thread of autograd's, whatever stream and device are current where it is
asked for, and gives the gradients of a plain call bit for bit."""

import threading

import pytest
import torch
from on_cuda import expect_taken, moved_all, skip_without_cuda
from problems import TENSORS, Problem, make, with_gradients

from flash_qla import chunk_gated_delta_rule

skip_without_cuda()

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EACH_DTYPE = pytest.mark.parametrize("dtype", [BF16, F16, F32])
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
EACH_DEVICE = pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=TWO_DEVICES)])
CYCLES = 100_000_000  # of a kernel that only waits: about 50 ms


def arguments_on(device, dtype):
    options = {"gate": "computed", "beta": "sigmoid", "dim_k": 64, "dim_v": 64, "heads_qk": 2, "heads_v": 4}
    return moved_all(make(Problem(lengths=(100, 50), slack=10, dtype=dtype, **options)), device)


def forward(leaves):
    return chunk_gated_delta_rule(**leaves, output_final_state=True)


def loss_of(o, state):
    return o.float().square().sum() + state.square().sum()


def gradients_of(leaves):
    return {name: leaves[name].grad for name in TENSORS if leaves.get(name) is not None}


def plain_gradients(arguments):
    """With the tensors' device current, on its default stream, all finished."""
    expect_taken(arguments, "chunk_backward")
    leaves = with_gradients(arguments)
    with torch.cuda.device(leaves["q"].device):
        loss_of(*forward(leaves)).backward()
        torch.cuda.synchronize()
    return gradients_of(leaves)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.device == expected[name].device and torch.equal(x, expected[name]), name


@EACH_DTYPE
@EACH_DEVICE
@pytest.mark.parametrize("aside", ["forward", "backward", "both"])
def test_forward_and_backward_on_different_streams(device, dtype, aside):
    """With the tensors' device current. Each begins late on its stream, so that what did not wait for it would read too early."""
    arguments = arguments_on(device, dtype)
    expected = plain_gradients(arguments)
    with torch.cuda.device(device):
        here = torch.cuda.current_stream()
        first = here if aside == "backward" else torch.cuda.Stream()
        second = here if aside == "forward" else torch.cuda.Stream()
        leaves = with_gradients(arguments)
        with torch.cuda.stream(first):
            torch.cuda._sleep(CYCLES)
            o, state = forward(leaves)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            loss = loss_of(o, state)
            torch.cuda._sleep(CYCLES)
            loss.backward()
            got = {name: x.clone() for name, x in gradients_of(leaves).items()}  # on the stream that asked for them
        torch.cuda.synchronize()
    assert_same(got, expected)


@EACH_DTYPE
@EACH_DEVICE
def test_backward_asked_for_by_another_thread(device, dtype):
    """There device 0 and its default stream are current."""
    arguments = arguments_on(device, dtype)
    expected = plain_gradients(arguments)
    leaves = with_gradients(arguments)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        loss = loss_of(*forward(leaves))
    devices = []

    def backward():
        devices.append(torch.cuda.current_device())
        loss.backward()
        devices.append(torch.cuda.current_device())

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    torch.cuda.synchronize(device)
    assert devices == [0, 0]
    assert_same(gradients_of(leaves), expected)


@TWO_DEVICES
@EACH_DTYPE
@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("current", [(0, 0), (1, 0), (0, 1)], ids=lambda c: f"forward with {c[0]}, backward with {c[1]}")
def test_A16_tensors_on_device_1_whatever_is_current(dtype, current, aside):
    """Device 0 is left alone: nothing is allocated there, and it is current again afterwards where it was."""
    arguments = arguments_on("cuda:1", dtype)
    expected = plain_gradients(arguments)
    leaves = with_gradients(arguments)
    stream = torch.cuda.Stream("cuda:1") if aside else torch.cuda.default_stream("cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.stream(stream):  # makes the stream's device current as well
        torch.cuda._sleep(CYCLES)
        with torch.cuda.device(current[0]):
            o, state = forward(leaves)
            assert torch.cuda.current_device() == current[0]
        loss = loss_of(o, state)
    torch.cuda.default_stream("cuda:1").wait_stream(stream)
    with torch.cuda.device(current[1]):
        loss.backward()
        assert torch.cuda.current_device() == current[1]
    torch.cuda.synchronize(1)
    assert torch.cuda.max_memory_allocated(0) == before
    assert_same(gradients_of(leaves), expected)
