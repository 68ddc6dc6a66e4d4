"""The demo: trains a small byte-level language model with gated delta rule layers on real text, runs it, and shows what the
operation is worth.

Environment: TEXT=file (default: the sources of Python's standard library), DEVICE=cpu or cuda, DEMO_SECONDS=180 (for
everything), DEMO_OUT=demo-out. `--smoke` runs every step in miniature within seconds, too short to learn anything: for tests.
Exit code 0: the model beats the one without the operation clearly, and prefill and decode agree; else 1.
"""

import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "demo")]

import torch  # noqa: E402
from data import even_windows, from_line_start, load_text, random_windows, readable  # noqa: E402
from generate import continue_text, differences  # noqa: E402
from model import FLASH_QLA, NONE, PYTORCH, ByteModel, Config  # noqa: E402
from picture import draw  # noqa: E402
from throughput import layer_inputs, model_rates, operation_rates  # noqa: E402
from train import Recipe, held_out_loss, train_side_by_side  # noqa: E402

import flash_qla  # noqa: E402

MARGIN_BITS = 0.1  # a byte: the least by which the held-out loss must be lower for "clearly better"
MAX_DIFFERENCE = 1e-4  # between the logits of chunked prefill and of decode, relative to their RMS, in fp32
SHARE_TRAINING, SHARE_MODEL_RATES, SHARE_OPERATION_RATES = 0.75, 0.05, 0.1  # of the time; the rest is everything else


@dataclass(frozen=True)
class Size:
    """Everything that the smoke mode makes small."""

    config: Config = Config()
    recipe: Recipe = Recipe(seconds=0)
    steps: int | None = None  # None: as many as the time allows
    test_windows: int = 256
    passage: int = 500  # not a multiple of a chunk
    prefix: int = 300
    prompt: int = 300
    written: int = 400
    prefill: int = 2048
    decode: int = 64
    lengths: tuple = (64, 128, 256, 512, 1024, 2048, 4096)
    shown: tuple = (3, 5)  # which of them the table on screen has
    heads: tuple = (4, 8, 128)  # Hq, Hv, D of the operation alone


SMOKE = Size(
    Config(width=32, layers=1, heads_qk=1, heads_v=2, head_dim=16, mlp=32),
    Recipe(seconds=0, batch=2, window=96, evaluations=2, evaluation_windows=2),
    steps=4,
    test_windows=2,
    passage=100,
    prefix=70,
    prompt=70,
    written=20,
    prefill=128,
    decode=4,
    lengths=(64, 128),
    shown=(1,),
    heads=(1, 2, 16),
)


def heading(number, text):
    print(f"\n[{number}/5] {text}", flush=True)


def indented(text):
    return "\n".join("    | " + line for line in text.split("\n"))


def explained(size, device, operation="chunk_forward"):
    c = size.config
    inputs = layer_inputs(size.recipe.window, c.heads_qk, c.heads_v, c.head_dim, device)
    return flash_qla.explain(*inputs[:5], operation=operation)


def refusal_of(device, size):
    """Why the demo cannot run on `device`, in a sentence; None if it can."""
    reason = flash_qla.device_support(device)
    if reason is not None:
        return reason
    for operation in ("chunk_forward", "chunk_backward", "recurrent_forward"):
        answer = explained(size, device, operation)
        if answer.implementation is None:
            return f"{operation} in float32: " + "; ".join(f"{name} {reason}" for name, reason in answer)
    return None


def introduce(size, text, seconds, smoke, device):
    c = size.config
    implementation = explained(size, device).implementation
    parameters = sum(p.numel() for p in ByteModel(c, NONE).parameters())
    print("flash_qla demo: trains two small language models, which predict the next byte, on the same text.")
    print("They differ in one thing: in the first, bytes are mixed by gated delta rule layers, which keep a memory")
    print("of all that was read; in the second that operation is replaced by o = v, so that it sees")
    print(f"only the last {1 + c.layers * (c.conv - 1)} bytes, which its short convolutions reach.")
    print(
        f"  time     {'a miniature of every step' if smoke else f'about {seconds:.0f} s in all; DEMO_SECONDS=... changes that'}"
    )
    print(f"  machine  {machine_of(device)}")
    print(f"  library  flash_qla {flash_qla.__version__}, implementation {implementation}; PyTorch {torch.__version__}")
    print(f"  text     {text.source}")
    print(f"           {text.train.numel():,} bytes to train on, {text.held_out.numel():,} bytes held out")
    print(f"  model    {parameters:,} parameters, {c.layers} layers of width {c.width}, in each {c.heads_qk} query/key heads and")
    print(f"           {c.heads_v} value heads of size {c.head_dim}; float32, which every CPU computes fast")
    return implementation


def machine_of(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def train_both(size, text, seconds):
    heading(1, "Training both: same seed, batches and steps. Loss on the training text in bits per byte (8: knows nothing)")
    models = []
    for operation in (FLASH_QLA, NONE):
        torch.manual_seed(size.recipe.seed)
        models.append(ByteModel(size.config, operation).to(text.train.device))
    return models, train_side_by_side(models, text, replace(size.recipe, seconds=SHARE_TRAINING * seconds), size.steps)


def judge(models, courses, text, size, smoke):
    heading(2, "Held-out text: bits needed per byte that no model has seen (lower is better)")
    windows = even_windows(text.held_out, size.test_windows, size.recipe.window)
    by_position = {model.operation.name: held_out_loss(model, windows) for model in models}
    words = {FLASH_QLA.name: "with the gated delta rule", NONE.name: "with the operation replaced by o = v"}
    for course in courses:
        print(
            f"  {words[course.name]:<38} {by_position[course.name].mean():.3f}   "
            f"(trained on {course.bytes_seen:,} bytes, {course.bytes_per_second():,.0f} bytes/s)"
        )
    saved = (by_position[NONE.name] - by_position[FLASH_QLA.name]).mean().item()
    better = saved > MARGIN_BITS
    if smoke:
        print("  -> not judged: a miniature run is too short to learn anything")
    else:
        print(f"  -> {saved:.3f} bits per byte lower: {'clearly' if better else 'NOT clearly'} better (bound {MARGIN_BITS})")
    return by_position, better or smoke


def check_agreement(model, text, size):
    heading(3, "Prefill and decode: a held-out passage read in one chunked pass, and in other ways that must agree")
    passage = even_windows(text.held_out, 1, size.passage)[:, :-1]
    found, rms = differences(model, passage, size.prefix)
    words = {
        "pieces": f"{size.prefix} bytes, then {size.passage - size.prefix}, state carried over",
        "steps": f"{size.prefix} bytes, then byte by byte (decode)",
    }
    for name, difference in found.items():
        print(f"  {words[name]:<40} largest difference in a logit {difference:.1e}")
    bound = MAX_DIFFERENCE * rms
    agree = max(found.values()) <= bound
    print(f"  -> they {'agree' if agree else 'DO NOT AGREE'} (bound {bound:.1e}, {MAX_DIFFERENCE:g} of the logits' RMS)")
    return agree


def write_on(model, text, size):
    heading(4, f"Writing: the model reads {size.prompt} held-out bytes (prefill) and continues them by {size.written} (decode)")
    prompt = from_line_start(text.held_out, text.held_out.numel() // 2, size.prompt)
    written, prefill_seconds, decode_seconds = continue_text(model, prompt, size.written, temperature=0.8, seed=size.recipe.seed)
    print("  it reads:")
    print(indented(readable(prompt.tolist())))
    print("  it writes:")
    print(indented(readable(written)))
    print(f"  -> read in {1e3 * prefill_seconds:.0f} ms, written at {size.written / decode_seconds:,.0f} bytes/s")


def measure(model, text, size, seconds):
    heading(5, "Speed: tokens (here: bytes) per second, against the same operation written in plain PyTorch")
    passage = even_windows(text.held_out, 1, size.prefill)[:, :-1]
    batch = random_windows(text.train, size.recipe.batch, size.recipe.window, torch.Generator().manual_seed(0))
    whole = model_rates(model, passage, size.decode, batch, SHARE_MODEL_RATES * seconds)
    heads_qk, heads_v, dim = size.heads
    alone = operation_rates(size.lengths, (heads_qk, heads_v, dim), text.train.device, SHARE_OPERATION_RATES * seconds)
    words = {
        "training": f"training, {size.recipe.batch} sequences of {size.recipe.window}",
        "prefill": f"prefill, one sequence of {passage.shape[1]}",
        "decode": "decode, one sequence, token by token",
    }
    show_rates("the whole model", [(words[kind], rates) for kind, rates in whole.items()])
    rows = [
        (f"{kind}, T = {size.lengths[i]}", {name: values[i] for name, values in rates.items()})
        for kind, rates in alone.items()
        for i in size.shown
    ]
    show_rates(f"one operation, Hq = {heads_qk}, Hv = {heads_v}, D = {dim}", rows)
    print("  Plain PyTorch: chunks of 64 with solve_triangular and autograd; for decode a recurrence token by token.")
    return alone


def show_rates(title, rows):
    print(f"  {title:<44} {FLASH_QLA.name:>12} {PYTORCH.name:>14}    ratio")
    for words, rates in rows:
        ours, plain = rates[FLASH_QLA.name], rates[PYTORCH.name]
        print(f"    {words:<42} {ours:>12,.0f} {plain:>14,.0f} {ours / plain:>7.1f}x")


def main():
    begin = time.perf_counter()
    smoke = "--smoke" in sys.argv[1:]
    size = SMOKE if smoke else Size()
    seconds = float(os.environ.get("DEMO_SECONDS") or 180)
    picture = Path(os.environ.get("DEMO_OUT") or ROOT / "demo-out") / "demo.png"
    device = os.environ.get("DEVICE") or "cpu"
    refusal = refusal_of(device, size)
    if refusal is not None:
        raise SystemExit(f"DEVICE={device} is refused: {refusal}")
    device = torch.device(device)
    torch.backends.cudnn.allow_tf32 = False  # of the convolution: "float32" is meant
    text = load_text(os.environ.get("TEXT")).to(device)
    implementation = introduce(size, text, seconds, smoke, device)
    models, courses = train_both(size, text, seconds)
    by_position, better = judge(models, courses, text, size, smoke)
    agree = check_agreement(models[0], text, size)
    write_on(models[0], text, size)
    rates = measure(models[0], text, size, seconds)
    heads_qk, heads_v, dim = size.heads
    shape = f"Hq = {heads_qk}, Hv = {heads_v}, K = V = {dim}, float32"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    where = f"{place} ({implementation})"
    headline = f"flash_qla {flash_qla.__version__} demo on {where}; text: {text.source}"
    draw(picture, courses, by_position, list(size.lengths), rates, shape, headline)
    print(f"\nPicture (loss curves; speed against sequence length): {picture}")
    good = better and agree
    print(f"Done in {time.perf_counter() - begin:.0f} s. {'All checks passed.' if good else 'A CHECK FAILED: see the -> lines.'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
