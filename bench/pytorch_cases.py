"""Measures flash_qla, called from PyTorch, against the plain PyTorch formulation of the same operation: in one process, in turn.

One thread: CPU time of the calling thread, so that other work on the machine counts less; several threads: wall time. Each figure
is the median of the rounds; one round is one call of each library.
"""

import statistics
import time
from functools import partial

import torch
import torch_formulation

import flash_qla

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FLOPS_PER_KV = {"forward": 7, "backward": 19, "forward_backward": 26, "recurrent": 7}  # a token and value head
MIN_ROUNDS, MAX_ROUNDS = 3, 200


def make_inputs(case):
    """q, k (normalised), v, log decay g, beta of the case."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens, dtype = case["B"], case["T"], DTYPES[case["dtype"]]
    q, k = (torch.randn(batch, tokens, case["Hq"], case["K"], generator=generator) for _ in range(2))
    v = torch.randn(batch, tokens, case["Hv"], case["V"], generator=generator)
    g = -torch.rand(batch, tokens, case["Hv"], generator=generator) * 0.1
    beta = torch.rand(batch, tokens, case["Hv"], generator=generator)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]


def forward(operation, inputs):
    with torch.inference_mode():
        operation(*inputs)


def forward_backward(operation, inputs, d_o):
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(operation(*leaves)[0], leaves, d_o)


def prepared_backward(operation, inputs, d_o):
    """The backward alone, of a graph that is kept."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = operation(*leaves)[0]
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def prepared_step(operation, inputs, state):
    """One decoding step from a state; the new state is wanted."""

    def run():
        with torch.inference_mode():
            operation(*inputs[:3], g=inputs[3], beta=inputs[4], initial_state=state, output_final_state=True)

    return run


def runs_of(case):
    """{"flash_qla": a call, "pytorch": a call} for the case."""
    inputs = make_inputs(case)
    if case["op"] == "recurrent":
        state = torch.randn(case["B"], case["Hv"], case["K"], case["V"], generator=torch.Generator().manual_seed(1))
        steps = {
            "flash_qla": flash_qla.fused_recurrent_gated_delta_rule,
            "pytorch": torch_formulation.recurrent_gated_delta_rule,
        }
        return {name: prepared_step(operation, inputs, state) for name, operation in steps.items()}
    operations = {"flash_qla": flash_qla.chunk_gated_delta_rule, "pytorch": torch_formulation.chunk_gated_delta_rule}
    if case["op"] == "forward":
        return {name: partial(forward, operation, inputs) for name, operation in operations.items()}
    d_o = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)).to(inputs[2].dtype)
    if case["op"] == "backward":
        return {name: prepared_backward(operation, inputs, d_o) for name, operation in operations.items()}
    return {name: partial(forward_backward, operation, inputs, d_o) for name, operation in operations.items()}


def implementation_of(case):
    """Name of the implementation that runs the case, of the slower half for forward + backward."""
    operation = {"forward": "chunk_forward", "recurrent": "recurrent_forward"}.get(case["op"], "chunk_backward")
    return flash_qla.explain(*make_inputs({**case, "T": min(case["T"], 64)}), operation=operation).implementation


def peak_of(case, implementation, peaks):
    """Gflop/s that the instructions of `implementation` reach on this machine with the case's threads; None if not measured."""
    peak = next((entry for entry in peaks if entry["threads"] == case["threads"]), {})
    for end, key in (("bf16", "bf16_dot_gflops"), ("avx512", "fp32_avx512_gflops"), ("avx2", "fp32_avx2_gflops")):
        if implementation.endswith(end):
            return peak.get(key)
    return peak.get("fp32_plain_gflops")


def measure(case, seconds, peaks):
    """`case`: the keys of a line of tests/cases/bench.txt. Returns it with the figures of both libraries."""
    torch.set_num_threads(case["threads"])
    clock = time.thread_time if case["threads"] == 1 else time.perf_counter
    runs, times = runs_of(case), {"flash_qla": [], "pytorch": []}
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while len(times["pytorch"]) < MIN_ROUNDS or (time.perf_counter() - begin < seconds and len(times["pytorch"]) < MAX_ROUNDS):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    tokens = case["B"] * case["T"]
    gflops = FLOPS_PER_KV[case["op"]] * case["K"] * case["V"] * case["Hv"] * tokens / median["flash_qla"] / 1e9
    implementation = implementation_of(case)
    peak = peak_of(case, implementation, peaks)
    return {
        **case,
        "implementation": implementation,
        "rounds": len(times["pytorch"]),
        "clock": "cpu" if case["threads"] == 1 else "wall",
        "seconds": median["flash_qla"],
        "seconds_pytorch": median["pytorch"],
        "tokens_per_second": tokens / median["flash_qla"],
        "tokens_per_second_pytorch": tokens / median["pytorch"],
        "ratio": median["pytorch"] / median["flash_qla"],
        "gflops": gflops,
        "share_of_peak": None if not peak else gflops / peak,
    }
