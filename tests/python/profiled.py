"""What a call does on a CUDA device, as torch's profiler tells: kernels, copies, calls of CUDA that make the host wait.

Read from the trace that the profiler exports, whose categories and names have stayed the same over versions of torch. Without a
device it holds nothing but the range of the call.
"""

import dataclasses
import json
import re
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "the recorded call"
_MARGIN = 0.002  # seconds around the call and around its range: clocks of device and host need not agree better than this
_OF_CUDA = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"^(cuda|cu)LaunchKernel")  # ...ExC, ...Ex, _ptsz
_WAIT = re.compile(r"Synchronize")  # of a stream, an event, a device, a context
_MEMORY = re.compile(r"^(cuda|cu)(Malloc|MemAlloc|Free|MemFree|HostAlloc)")


@dataclasses.dataclass(frozen=True)
class Record:
    """Names, in the order of the trace."""

    kernels: list[str]  # that ran; or, if the profiler sees none run, the calls that launched them
    copies: list[str]
    fills: list[str]
    waits: list[str]
    allocations: list[str]


def read_trace(events: list[dict]) -> Record:
    """Whatever ran on the device during the whole trace, and the calls of CUDA from any thread within the range of the call."""
    events = [{**event, "ts": float(event["ts"])} for event in events if event.get("ph") == "X"]
    (whole,) = (event for event in events if event.get("cat") == "user_annotation" and event["name"] == _RANGE)

    def names(*categories):
        return [event["name"] for event in events if event.get("cat") in categories]

    calls = {}  # one call may be told twice, as the runtime's and the driver's
    for number, event in enumerate(events):
        if event.get("cat") in _OF_CUDA and whole["ts"] <= event["ts"] <= whole["ts"] + whole["dur"]:
            calls.setdefault(event.get("args", {}).get("correlation", f"event {number}"), event["name"])
    launches, waits, allocations = ([x for x in calls.values() if pattern.search(x)] for pattern in (_LAUNCH, _WAIT, _MEMORY))
    ran = names("kernel")
    return Record(ran if len(ran) >= len(launches) else launches, names("gpu_memcpy"), names("gpu_memset"), waits, allocations)


def trace(call) -> list[dict]:
    """The events of the profiler's trace of one call."""
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    if on_cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        time.sleep(_MARGIN)
        with record_function(_RANGE):
            time.sleep(_MARGIN)
            result = call()
            time.sleep(_MARGIN)
        time.sleep(_MARGIN)
        if on_cuda:
            torch.cuda.synchronize()
    del result
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(errors="replace"))["traceEvents"]


def record(call) -> Record:
    return read_trace(trace(call))


def unseen() -> str | None:
    """Why records say nothing on this machine: the profiler does not see what it must, in a call that does it all."""
    x = torch.ones(1000, device="cuda")
    for _ in range(2):  # the first one of a process also starts the profiler's part on the device
        seen = record(lambda: (x + 1).sum().item())
    missing = [name for name in ("kernels", "copies", "waits") if not getattr(seen, name)]
    return f"torch's profiler sees no {', no '.join(missing)} of a call that has them" if missing else None
