"""One library's process of bench/gpu.py: reads a JSON line a request from the standard input, answers with one.

    gpu_worker.py LIBRARY FOLDER DEVICE

FOLDER is put in front of the path: of two packages with one name, each process sees its own. Requests: {"prepare": case}
makes the row's data, makes the first call, measures memory and host time and captures a CUDA graph of the call; {"replay": n}
times the graph n times; {"drop": 1} frees everything.
"""

import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

HOST_CALLS = 10
DIM = 128


def make_data(case, device):
    """A row's tensors. The same numbers in every process: the generators are seeded alike."""
    import torch
    from torch.nn.functional import logsigmoid, normalize

    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    lengths, heads_qk, heads_v = case["lengths"], case["heads_qk"], case["heads_v"]
    packed, decode = case["packed"], case["op"] == "decode"
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    data = {name: normalize(normal(batch, tokens, heads_qk, DIM), dim=-1).bfloat16() for name in ("q", "k")}
    data["v"] = normal(batch, tokens, heads_v, DIM).bfloat16()
    g = logsigmoid(normal(batch, tokens, heads_v)) / 16
    if case["undecayed"]:
        g[..., round(1 / case["undecayed"]) - 1 :: round(1 / case["undecayed"])] = 0
    data["g"], data["beta"] = g, normal(batch, tokens, heads_v).sigmoid()
    data["offsets"] = None
    if packed:
        data["offsets"] = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)
    states = (len(lengths), heads_v, DIM, DIM)
    if decode:
        data["pools"] = [normal(*states) for _ in range(case["layers"])]
    else:
        data["state"] = normal(*states)
    if case["op"] == "backward":
        data["d_o"], data["d_state"] = normal(batch, tokens, heads_v, DIM).bfloat16(), normal(*states)
    return data


class Worker:
    def __init__(self, library, device):
        import torch
        from gpu_libraries import LIBRARIES

        self.torch, self.device, self.cuda = torch, torch.device(device), device.startswith("cuda")
        self.library = LIBRARIES[library]()
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.drop()

    def hello(self):
        name = self.torch.cuda.get_device_name() if self.cuda else "cpu"
        return {"version": self.library.version, "torch": self.torch.__version__, "device": name}

    def drop(self):
        self.call = self.graph = self.data = None
        gc.collect()
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        return {}

    def on_stream(self):
        return self.torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    def wait(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def prepare(self, case):
        if not hasattr(self.library, case["op"]):
            return {"refused": f"no {case['op']}"}
        self.drop()
        self.data = make_data(case, self.device)
        self.wait()
        with self.on_stream():
            return self.prepare_here(case)

    def prepare_here(self, case):
        begin = time.perf_counter()
        if case["op"] == "backward":
            self.call = self.library.backward(self.data, self.data["d_o"], self.data["d_state"])
        else:
            self.call = getattr(self.library, case["op"])(self.data)
        self.wait()
        answer = {"first_ms": None}
        prepared = time.perf_counter()
        results = self.call()
        self.wait()
        answer["first_ms"] = 1e3 * (time.perf_counter() - prepared)
        answer["made_ms"] = 1e3 * (prepared - begin)  # of a backward row: its forward
        answer["norms"] = [float(x.float().norm()) for x in results if x is not None]
        answer["output_bytes"] = sum(x.nbytes for x in results if x is not None)
        del results
        if hasattr(self.library, "implementation"):
            answer["implementation"] = self.implementation(case["op"])
        answer["host_us"] = self.host_time() / case["layers"]
        answer["extra_bytes"] = self.extra_memory()
        if self.cuda:
            self.graph = self.captured(self.call)
        if case["op"] == "decode":
            answer["copy_ms"] = self.copy_time(case["layers"])
        return answer

    def implementation(self, op):
        try:
            return self.library.implementation(self.data, op)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # worth a note, not the row
            return f"unknown: {error}".splitlines()[0]

    def host_time(self):
        """Microseconds of the calling thread in an eager call."""
        times = []
        for _ in range(HOST_CALLS):
            begin = time.perf_counter()
            self.call()
            times.append(time.perf_counter() - begin)
            self.wait()
        return 1e6 * statistics.median(times)

    def extra_memory(self):
        """Peak bytes of an eager call beyond what was there before: its outputs and what it works with."""
        if not self.cuda:
            return None
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        self.call()
        self.wait()
        return self.torch.cuda.max_memory_allocated() - before

    def captured(self, call):
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            call()
        return graph

    def timed(self, call):
        if not self.cuda:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def copy_time(self, layers):
        """Milliseconds in which the device copies as many bytes as a call reads and writes of states."""
        pool = self.data["pools"]
        half = pool[0].numel() // 2

        def copy():
            for states in pool:
                states.view(-1)[:half].copy_(states.view(-1)[-half:])

        run = self.captured(copy).replay if self.cuda else copy
        return 2 * statistics.median(self.timed(run) for _ in range(HOST_CALLS)) / layers

    def replay(self, count):
        call = self.graph.replay if self.graph else self.call
        with self.on_stream():
            self.timed(call)
            return {"ms": [self.timed(call) for _ in range(count)]}


def refusal(error):
    traceback.print_exc(file=sys.stderr)
    return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def answer_of(worker, request):
    try:
        ((verb, argument),) = request.items()
        return worker.drop() if verb == "drop" else getattr(worker, verb)(argument)
    except Exception as error:  # a row that a library cannot do is an answer
        return refusal(error)


def main():
    library, folder, device = sys.argv[1:4]
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", here)), here]
    worker = None
    try:
        worker = Worker(library, device)
        hello = worker.hello()
    except Exception as error:  # not installed, or not for this device
        hello = refusal(error)
    print(json.dumps(hello), file=channel, flush=True)
    if worker is None:
        return
    for line in sys.stdin:
        print(json.dumps(answer_of(worker, json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
