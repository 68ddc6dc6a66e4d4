"""The demo: trains a small byte-level language model with gated delta rule layers on real text, runs it, and shows what the operation is worth.

Environment: TEXT=file (default: the sources of Python's standard library), DEVICE=cpu, DEMO_SECONDS=180 (time for everything), DEMO_OUT=demo-out.
`--smoke` runs every step in miniature within seconds, too short to learn anything: for tests.
Exit code 0: the model beats the one without the operation clearly, and prefill and decode agree; else 1.
"""

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "demo")]

import flash_qla  # noqa: E402
import torch  # noqa: E402
from data import even_windows, load_text, random_windows, readable  # noqa: E402
from generate import continue_text, differences  # noqa: E402
from model import FLASH_QLA, NONE, PYTORCH, ByteModel, Config  # noqa: E402
from picture import draw  # noqa: E402
from throughput import layer_inputs, model_rates, operation_rates  # noqa: E402
from train import Recipe, held_out_loss, train_side_by_side  # noqa: E402

MARGIN_BITS = 0.1  # a byte: the least by which the held-out loss must be lower for "clearly better"
MAX_DIFFERENCE = 1e-3  # between the logits of chunked prefill and of decode, in fp32
SHARE_TRAINING, SHARE_MODEL_RATES, SHARE_OPERATION_RATES = 0.64, 0.08, 0.16  # of the time; the rest is everything else


@dataclass(frozen=True)
class Size:
    """Everything that the smoke mode makes small."""

    config: Config = Config()
    recipe: Recipe = Recipe(seconds=0)
    steps: int | None = None  # None: as many as the time allows
    test_windows: int = 48
    passage: int = 500  # not a multiple of a chunk
    prefix: int = 300
    prompt: int = 300
    written: int = 400
    prefill: int = 2048
    decode: int = 64
    lengths: tuple = (64, 128, 256, 512, 1024, 2048, 4096)
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
    heads=(1, 2, 16),
)


def heading(number, text):
    print(f"\n[{number}/5] {text}", flush=True)


def indented(text):
    return "\n".join("    | " + line for line in text.split("\n"))


def refuse_other_devices(device):
    reason = flash_qla.device_support(device)
    if reason is not None:
        raise SystemExit(f"DEVICE={device} is refused: {reason}")


def introduce(size, text, seconds, smoke):
    c = size.config
    answer = flash_qla.explain(*layer_inputs(size.recipe.window, c.heads_qk, c.heads_v, c.head_dim)[:5])
    parameters = sum(p.numel() for p in ByteModel(c, NONE).parameters())
    print("flash_qla demo: two small language models are trained on the same text. Their mixing layers are gated delta rule layers; in the second")
    print("the operation is replaced by o = v, so that it knows only the few bytes that its short convolutions see. Everything else is the same.")
    print(f"  time     {'a miniature of every step (--smoke)' if smoke else f'about {seconds:.0f} seconds in all (DEMO_SECONDS=... changes that)'}")
    print(f"  machine  {platform.machine()} CPU, {torch.get_num_threads()} threads; flash_qla {flash_qla.__version__} runs as {answer.implementation!r}")
    print(f"  text     {text.train.numel():,} bytes to train on, {text.held_out.numel():,} held out: {text.source}")
    print(
        f"  model    {parameters:,} parameters, {c.layers} layers of width {c.width}, {c.heads_qk} query/key and {c.heads_v} value heads of {c.head_dim}; "
        "float32, the type in which any CPU trains well"
    )
    return answer.implementation


def train_both(size, text, seconds):
    heading(1, "Training both models side by side: same seed, same batches, same steps; one step of each in turn.")
    models = []
    for operation in (FLASH_QLA, NONE):
        torch.manual_seed(size.recipe.seed)
        models.append(ByteModel(size.config, operation))
    recipe = Recipe(**{**vars(size.recipe), "seconds": SHARE_TRAINING * seconds})
    courses = train_side_by_side(models, text, recipe, size.steps)
    return models, courses


def judge(models, courses, text, size, smoke):
    heading(2, "Held-out text: how many bits does each model need for a byte it has never seen? (8 = knows nothing; lower is better)")
    windows = even_windows(text.held_out, size.test_windows, size.recipe.window)
    by_position = {model.operation.name: held_out_loss(model, windows) for model in models}
    with_op, without = (by_position[operation.name].mean().item() for operation in (FLASH_QLA, NONE))
    print(f"  with the gated delta rule            {with_op:.3f} bits per byte")
    print(f"  with the operation replaced by o = v {without:.3f} bits per byte")
    for model, course in zip(models, courses):
        print(f"  trained on {course.bytes_seen:,} bytes in {course.seconds:.1f} s = {course.bytes_per_second():,.0f} bytes/s: {course.name}")
    better = without - with_op > MARGIN_BITS
    verdict = "clearly better" if better else "NOT clearly better"
    asked = f"at least {MARGIN_BITS} asked for" + ("; a miniature run is too short for it, not judged" if smoke else "")
    print(f"  -> the operation saves {without - with_op:.3f} bits per byte: {verdict} ({asked})")
    return by_position, better or smoke


def check_agreement(model, text, size):
    heading(3, "The same held-out passage in one chunked pass, in two passes with the state carried over, and byte by byte.")
    passage = even_windows(text.held_out, 1, size.passage)[:, :-1]
    found, rms = differences(model, passage, size.prefix)
    for name, words in (("pieces", f"{size.prefix} bytes, then the other {size.passage - size.prefix}"), ("steps", f"{size.prefix} bytes, then one at a time (decode)")):
        print(f"  {words:<44} largest difference in any logit {found[name]:.1e}")
    worst = max(found.values())
    agree = worst <= MAX_DIFFERENCE
    print(f"  -> {'agree' if agree else 'DO NOT AGREE'} (bound {MAX_DIFFERENCE:g}; the logits have an RMS of {rms:.1f})")
    return agree


def write_on(model, text, size, seed):
    heading(4, f"The model reads {size.prompt} bytes of held-out text in one chunked pass and writes {size.written} more, one at a time.")
    middle = text.held_out.numel() // 2
    prompt = text.held_out[middle : middle + size.prompt]
    written, prefill_seconds, decode_seconds = continue_text(model, prompt, size.written, temperature=0.7, seed=seed)
    print("  the prompt:")
    print(indented(readable(prompt.tolist())))
    print("  the model's continuation:")
    print(indented(readable(written)))
    print(f"  -> prompt read in {1e3 * prefill_seconds:.1f} ms, then {size.written / decode_seconds:,.0f} bytes/s")


def measure(model, text, size, seconds):
    heading(5, "Speed, in bytes (tokens) per second, and against the plain PyTorch formulation of the same operation.")
    passage = even_windows(text.held_out, 1, size.prefill)[:, :-1]
    batch = random_windows(text.train, size.recipe.batch, size.recipe.window, torch.Generator().manual_seed(0))
    whole = model_rates(model, passage, size.decode, batch, SHARE_MODEL_RATES * seconds)
    heads_qk, heads_v, dim = size.heads
    alone = operation_rates(size.lengths, heads_qk, heads_v, dim, SHARE_OPERATION_RATES * seconds)
    columns = f"{FLASH_QLA.name:>12} {PYTORCH.name:>14}   ratio"
    print(f"  {'the whole model':<58} {columns}")
    words = {
        "training": f"training, forward and backward, {size.recipe.batch} x {size.recipe.window} bytes",
        "prefill": f"prefill, {size.prefill} bytes at once",
        "decode": "decode, byte after byte, one sequence",
    }
    rows = [(words[kind], rates[FLASH_QLA.name], rates[PYTORCH.name]) for kind, rates in whole.items()]
    show_rows(rows)
    print(f"  {f'the operation alone, {heads_qk} q/k and {heads_v} value heads of {dim}':<58} {columns}")
    for kind, rates in alone.items():
        show_rows([(f"{kind}, T = {size.lengths[i]}", rates[FLASH_QLA.name][i], rates[PYTORCH.name][i]) for i in (len(size.lengths) // 2, -1)])
    return alone


def show_rows(rows):
    for words, ours, plain in rows:
        print(f"    {words:<56} {ours:>12,.0f} {plain:>14,.0f} {ours / plain:>6.1f}x")


def main():
    begin = time.perf_counter()
    smoke = "--smoke" in sys.argv[1:]
    size = SMOKE if smoke else Size()
    seconds = float(os.environ.get("DEMO_SECONDS") or 180)
    out = Path(os.environ.get("DEMO_OUT") or ROOT / "demo-out")
    refuse_other_devices(os.environ.get("DEVICE") or "cpu")
    text = load_text(os.environ.get("TEXT"))
    implementation = introduce(size, text, seconds, smoke)
    models, courses = train_both(size, text, seconds)
    by_position, better = judge(models, courses, text, size, smoke)
    agree = check_agreement(models[0], text, size)
    write_on(models[0], text, size, size.recipe.seed)
    rates = measure(models[0], text, size, seconds)
    heads_qk, heads_v, dim = size.heads
    headline = f"flash_qla {flash_qla.__version__} demo on {torch.get_num_threads()} CPU threads ({implementation}); text: {text.source}"
    picture = out / "demo.png"
    draw(picture, courses, by_position, list(size.lengths), rates, f"Hq = {heads_qk}, Hv = {heads_v}, K = V = {dim}, float32", headline)
    print(f"\nThe picture (loss curves, speed against sequence length) is in {picture}")
    print(f"Done in {time.perf_counter() - begin:.0f} seconds: {'all as it should be' if better and agree else 'SOMETHING IS NOT AS IT SHOULD BE, see -> above'}.")
    return 0 if better and agree else 1


if __name__ == "__main__":
    sys.exit(main())
