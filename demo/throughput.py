"""Tokens per second of the operation and of the whole model, with flash_qla and with the plain PyTorch formulation in turn."""

import statistics
import time
from functools import partial

import torch
from model import FLASH_QLA, PYTORCH

REPEATS = 5


def median_seconds(runs, limit):
    """Median wall time of each function of the dict `runs`: once to warm up, then in turn, so that a disturbance of the machine
    hits all alike. Up to REPEATS rounds, fewer (at least one) when they take longer than `limit` seconds."""
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    _finish()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            _finish()
            times[name].append(time.perf_counter() - start)
        if time.perf_counter() - begin > limit:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def _finish():
    """Waits for what runs put on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def layer_inputs(tokens, heads_qk, heads_v, dim, device="cpu"):
    """Random inputs of one layer as in a trained model: unit-variance q, k, v; raw gates and strengths."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, tokens, heads_qk, dim, generator=generator) for _ in range(2))
    v = torch.randn(1, tokens, heads_v, dim, generator=generator)
    a, b = (torch.randn(1, tokens, heads_v, generator=generator) for _ in range(2))
    return [x.to(device) for x in (q, k, v, a, b, torch.zeros(heads_v), torch.full((heads_v,), -3.0))]


def call(operation, tensors):
    q, k, v, a, b, a_log, dt_bias = tensors
    return operation.chunk(
        q,
        k,
        v,
        g=a,
        beta=b,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        initial_state=None,
        output_final_state=False,
    )[0]


def forward_only(operation, tensors):
    with torch.inference_mode():
        call(operation, tensors)


def forward_backward(operation, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    o = call(operation, leaves)
    torch.autograd.grad(o, leaves, torch.ones_like(o))


def operation_rates(lengths, heads, device, limit):
    """{"forward" | "forward + backward": {operation name: [tokens per second for each of `lengths`]}} with `heads`
    = (Hq, Hv, size), within about `limit` seconds."""
    kinds = {"forward": forward_only, "forward + backward": forward_backward}
    rates = {kind: {op.name: [] for op in (FLASH_QLA, PYTORCH)} for kind in kinds}
    for tokens in lengths:
        tensors = layer_inputs(tokens, *heads, device)
        for kind, run in kinds.items():
            runs = {op.name: partial(run, op, tensors) for op in (FLASH_QLA, PYTORCH)}
            for name, seconds in median_seconds(runs, limit * tokens / sum(lengths) / len(kinds)).items():
                rates[kind][name].append(tokens / seconds)
    return rates


def with_operation(model, operation, run):
    """`run` on the model with another operation in it."""

    def swapped():
        own, model.operation = model.operation, operation
        try:
            run()
        finally:
            model.operation = own

    return swapped


def model_rates(model, passage, decode_bytes, train_batch, limit):
    """{"training" | "prefill" | "decode": {operation name: bytes per second}} of the whole model with the operation swapped."""

    def training():
        loss = model(train_batch[:, :-1]).logsumexp(-1).mean()
        torch.autograd.grad(loss, list(model.parameters()))

    @torch.inference_mode()
    def prefill():
        model(passage, model.new_states())

    @torch.inference_mode()
    def decode():
        states = model.new_states()
        for t in range(decode_bytes):
            model(passage[:, t : t + 1], states)

    kinds = {
        "training": (training, train_batch[:, 1:].numel()),
        "prefill": (prefill, passage.numel()),
        "decode": (decode, decode_bytes),
    }
    rates = {}
    for kind, (run, count) in kinds.items():
        runs = {op.name: with_operation(model, op, run) for op in (FLASH_QLA, PYTORCH)}
        rates[kind] = {name: count / seconds for name, seconds in median_seconds(runs, limit / len(kinds)).items()}
    return rates
