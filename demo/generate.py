"""Runs a trained model on held-out text: all at once, in pieces, byte by byte; and lets it write on."""

import time

import torch


@torch.inference_mode()
def differences(model, passage, prefix):
    """The yardstick are the logits of `passage` ([1,T]) in one chunked pass. Returns the largest difference from them of
    {"pieces": two chunked passes, the second from the states that the first left, "steps": a chunked pass, then byte by byte},
    and the logits' RMS."""
    whole = model(passage)
    states = model.new_states()
    pieces = torch.cat((model(passage[:, :prefix], states), model(passage[:, prefix:], states)), 1)
    states = model.new_states()
    steps = [model(passage[:, :prefix], states)]
    steps += [model(passage[:, t : t + 1], states) for t in range(prefix, passage.shape[1])]
    found = {"pieces": pieces, "steps": torch.cat(steps, 1)}
    return {name: (logits - whole).abs().max().item() for name, logits in found.items()}, whole.square().mean().sqrt().item()


@torch.inference_mode()
def continue_text(model, prompt, length, temperature, seed):
    """Reads `prompt` ([T] bytes) in one chunked pass and writes `length` bytes one by one.
    Returns them and the seconds of both phases."""
    generator = torch.Generator().manual_seed(seed)
    states = model.new_states()
    begin = time.perf_counter()
    logits = model(prompt.long()[None], states)[0, -1].cpu()
    prefill_seconds = time.perf_counter() - begin
    written = []
    begin = time.perf_counter()
    for _ in range(length):
        byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        written.append(byte.item())
        logits = model(byte[None].to(prompt.device), states)[0, -1].cpu()
    return written, prefill_seconds, time.perf_counter() - begin
