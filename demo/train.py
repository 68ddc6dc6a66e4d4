"""Trains two models on the same batches, one step each in turn, within a time budget, and measures them on held-out text."""

import math
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from data import even_windows, random_windows

BITS = 1 / math.log(2)  # cross entropies are in nats, what is shown in bits per byte


@dataclass(frozen=True)
class Recipe:
    seconds: float  # for both models together; the learning rate follows the share of it that has passed
    least_steps: int = 150  # however long they take
    batch: int = 4
    window: int = 512  # bytes a sequence
    rate: float = 3e-3
    weight_decay: float = 0.05
    evaluations: int = 10  # of the held-out loss along the way, on a few windows
    evaluation_windows: int = 8
    seed: int = 1


@dataclass
class Course:
    """What training one model has shown: losses in bits per byte."""

    name: str
    train: list = field(default_factory=list)  # (bytes seen, loss) after every step
    held_out: list = field(default_factory=list)  # (bytes seen, loss)
    seconds: float = 0.0
    bytes_seen: int = 0

    def bytes_per_second(self):
        return self.bytes_seen / max(self.seconds, 1e-9)


class ProgressBar:
    """One line that moves on a terminal; on anything else a line for every tenth."""

    def __init__(self, width=20):
        self.width, self.terminal, self.last_tenth = width, sys.stdout.isatty(), 0

    def show(self, share, text):
        full = round(share * self.width)
        line = f"  [{'#' * full}{'.' * (self.width - full)}] {100 * share:3.0f} %  {text}"
        if self.terminal:
            print(f"\r{line}\033[K", end="\n" if share >= 1 else "", flush=True)
        elif int(share * 10) > self.last_tenth or share >= 1:
            self.last_tenth = int(share * 10)
            print(line, flush=True)


def optimizer_for(model, recipe):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))


def rate_at(share, step):
    """Factor of the learning rate: 20 steps of warm-up, then flat, then down to a twentieth over the second half of the time."""
    return min(1.0, (step + 1) / 20) * (1.0 if share < 0.5 else 0.05 + 0.95 * (1 - share) / 0.5)


@torch.inference_mode()
def held_out_loss(model, windows):
    """Bits per byte at each position of the windows ([length]), averaged over the windows."""
    total = torch.zeros(windows.shape[1] - 1, device=windows.device)
    for part in windows.split(8):
        logits = model(part[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1).sum(0)
    return (total / len(windows) * BITS).cpu()


def train_side_by_side(models, text, recipe, steps=None):
    """Trains all `models` for the same steps on the same batches; returns a Course each.
    `steps`: so many of them, instead of as many as the time allows (which on a slow or busy machine is exceeded: fewer than
    `recipe.least_steps` would teach nothing)."""
    generator = torch.Generator().manual_seed(recipe.seed)
    windows = even_windows(text.held_out, recipe.evaluation_windows, recipe.window)
    courses = [Course(model.operation.name) for model in models]
    optimizers = [optimizer_for(model, recipe) for model in models]
    bar, start, evaluated, step, share = ProgressBar(), time.perf_counter(), -1, 0, 0.0
    while share < 1:
        batch = random_windows(text.train, recipe.batch, recipe.window, generator)
        factor = rate_at(share, step)
        for model, course, optimizer in zip(models, courses, optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * factor
            train_step(model, course, optimizer, batch)
        step += 1
        if steps:
            share = min(1.0, step / steps)
        else:
            share = min(1.0, (time.perf_counter() - start) / recipe.seconds, step / recipe.least_steps)
        if int(share * recipe.evaluations) > evaluated or step == 1:
            evaluated = int(share * recipe.evaluations)
            for model, course in zip(models, courses, strict=True):
                course.held_out.append((course.bytes_seen, held_out_loss(model, windows).mean().item()))
        latest = ", ".join(f"{c.name} {smoothed(c.train)[-1][1]:.2f}" for c in courses)
        bar.show(share, f"step {step}: {latest}")
    return courses


def train_step(model, course, optimizer, batch):
    begin = time.perf_counter()
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    bits = loss.item() * BITS  # on a GPU this waits for the step
    course.seconds += time.perf_counter() - begin
    course.bytes_seen += batch[:, 1:].numel()
    course.train.append((course.bytes_seen, bits))


def smoothed(points, keep=0.95):
    """Running mean of a curve that forgets old points, without the pull of its start."""
    mean, weight, out = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out
