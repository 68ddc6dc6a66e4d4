"""What is read from the profiler's traces, without a device: traces made up, and one of a call on the CPU."""

import torch
from profiled import Record, read_trace, record


def event(category, name, begin=10.0, correlation=None, phase="X"):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": phase, "cat": category, "name": name, "ts": begin, "dur": 1.0, "args": args}


RANGE = {"ph": "X", "cat": "user_annotation", "name": "the recorded call", "ts": 5.0, "dur": 20.0}


def test_a_call_with_everything():
    events = [
        {"ph": "M", "name": "process_name"},
        event("cuda_runtime", "cudaDeviceSynchronize", 1.0, 1),  # before the call, as after it
        RANGE,
        event("cpu_op", "aten::add"),
        event("cuda_runtime", "cudaLaunchKernel", 10.0, 2),
        event("cuda_driver", "cuLaunchKernel", 10.5, 2),
        event("cuda_runtime", "cudaLaunchKernelExC", 11.0, 3),
        event("ac2g", "ac2g", 11.0, phase="s"),
        event("cuda_runtime", "cudaMemcpyAsync", 12.0, 4),
        event("cuda_runtime", "cudaStreamSynchronize", 13.0, 5),
        event("cuda_runtime", "cudaMalloc", 14.0, 6),
        event("kernel", "one", 30.0, 2),
        event("kernel", "two", 31.0, 3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 32.0, 4),
        event("gpu_memset", "Memset (Device)", 33.0, 7),
        event("cuda_runtime", "cudaDeviceSynchronize", 40.0, 8),
    ]
    copies, fills = ["Memcpy DtoH (Device -> Pinned)"], ["Memset (Device)"]
    assert read_trace(events) == Record(["one", "two"], copies, fills, ["cudaStreamSynchronize"], ["cudaMalloc"])


def test_launches_count_where_kernels_are_not_seen():
    events = [RANGE, event("cuda_runtime", "cudaLaunchKernelExC"), event("cuda_driver", "cuLaunchKernelEx")]
    assert read_trace(events).kernels == ["cudaLaunchKernelExC", "cuLaunchKernelEx"]


def test_a_call_on_the_cpu_does_nothing_on_a_device():
    x = torch.ones(10)
    assert record(lambda: x + x) == Record([], [], [], [], [])
