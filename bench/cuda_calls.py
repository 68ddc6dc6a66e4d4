#!/usr/bin/env python3
"""Host time of eager PyTorch calls on a CUDA device, and time of the first call of a process. Needs torch and the built package.

    PYTHONPATH=python bench/cuda_calls.py [--out FILE]      one JSON line a figure in FILE

Host time: what the calling thread spends in a call that only puts work on a stream; median over rounds that start with an idle
device and have too few calls to fill its queue. First call: from inputs on the device to the result, in a process where torch has
already started CUDA.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import flash_qla

ROUNDS, CALLS = 40, 20
BAR_HOST_US, AIM_HOST_US, BAR_FIRST_MS = 60, 30, 500  # of the eager forward of 2048 tokens; of any first call


def inputs(batch, tokens, heads_qk=16, heads_v=32, dim=128):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    q, k = (random(batch, tokens, heads_qk, dim) for _ in range(2))
    gates = [random(batch, tokens, heads_v, dtype=torch.float32) for _ in range(2)]
    return {"q": q, "k": k, "v": random(batch, tokens, heads_v, dim), "g": -gates[0].abs(), "beta": gates[1].sigmoid()}


def calls():
    """{name: function without arguments}; the first is the one with a bar."""
    options = {"use_qk_l2norm_in_kernel": True}
    whole, one, many = inputs(1, 2048), inputs(1, 1), inputs(32, 1)
    state = torch.zeros(1, 32, 128, 128, device="cuda")
    pool = torch.zeros(32, 32, 128, 128, device="cuda")
    rows = torch.arange(32, device="cuda")
    leaf = {**whole, "v": whole["v"].clone().requires_grad_()}
    offsets = torch.tensor([0, 1000, 2048], device="cuda")
    return {
        "forward 1x2048": lambda: flash_qla.chunk_gated_delta_rule(
            **whole, initial_state=state, output_final_state=True, **options
        ),
        "forward 1x2048, packed": lambda: flash_qla.chunk_gated_delta_rule(**whole, cu_seqlens=offsets, **options),
        "forward 1x2048, recording gradients": lambda: flash_qla.chunk_gated_delta_rule(**leaf, **options),
        "decode, 1 request": lambda: flash_qla.fused_recurrent_gated_delta_rule(
            **one, initial_state=state, output_final_state=True, **options
        ),
        "decode in a pool, 32 requests": lambda: flash_qla.recurrent_gated_delta_rule_pool(
            **many, state_pool=pool, read_rows=rows, **options
        ),
        "torch.mul of one element": lambda: torch.mul(state[0, 0, 0, :1], 2.0),
        "torch.empty on the device": lambda: torch.empty(1, device="cuda"),
    }


def host_us(call):
    for _ in range(3 * CALLS):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times), min(times)


def first_call(name):
    """In a process of its own, started with --first: prints milliseconds."""
    call = calls()[name]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    print(f"{(time.perf_counter() - begin) * 1e3:.1f}")


def first_ms(name, repeats=3):
    command = [sys.executable, str(Path(__file__).resolve()), "--first", name]
    return statistics.median(
        float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout) for _ in range(repeats)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="receives the figures, one JSON line each")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if reason := flash_qla.device_support("cuda"):
        raise SystemExit(reason)
    if arguments.first:
        return first_call(arguments.first)
    figures = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"host time of an eager call, us: median and least of {ROUNDS} rounds of {CALLS}")
    with torch.no_grad():
        everything = calls()
    for name, call in everything.items():
        with torch.set_grad_enabled("gradients" in name):
            median, least = host_us(call)
        figures.append({"call": name, "host_us": round(median, 2), "least_us": round(least, 2)})
        print(f"  {name:<38} {median:8.1f} {least:8.1f}", flush=True)
    median = figures[0]["host_us"]
    verdict = "reached" if median <= AIM_HOST_US else "missed"
    print(f"  -> bar {BAR_HOST_US} us {'met' if median <= BAR_HOST_US else 'MISSED'}, aim {AIM_HOST_US} us {verdict}")
    print("first call of a process after CUDA's own start, ms (median of 3 processes)")
    for name in ("forward 1x2048", "decode in a pool, 32 requests"):
        figures.append({"call": name, "first_ms": first_ms(name)})
        within = figures[-1]["first_ms"] <= BAR_FIRST_MS
        print(f"  {name:<38} {figures[-1]['first_ms']:8.1f}   bar {BAR_FIRST_MS} ms {'met' if within else 'MISSED'}", flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(figure) + "\n" for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
