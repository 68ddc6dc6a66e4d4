"""The speeds and sizes that the project sets itself, and which of them a measurement reaches.

Every bar is for D = 128, Hq = 16, Hv = 32 on the machine of the run itself: a share of its own measured peak, a ratio between two
things measured side by side, or bytes.
"""

from dataclasses import dataclass

LENGTHS = (512, 2048)
STATE_BYTES = 32 * 128 * 128 * 4  # fp32 states of all value heads
MIB = 1 << 20
SHARES = {  # of the peak of the implementation's instructions, one thread
    ("forward", "f32", "cpu-avx512"): 0.75,
    ("forward", "bf16", "cpu-avx512bf16"): 0.68,
    ("forward", "f32", "cpu-avx2"): 0.70,
    ("backward", "f32", "cpu-avx512"): 0.60,
    ("backward", "bf16", "cpu-avx512bf16"): 0.50,
}


@dataclass(frozen=True)
class Bar:
    """`value` and `reached` are None when nothing was measured for it: the machine or the cases lack it."""

    what: str
    unit: str
    bound: float
    value: float | None
    at_least: bool = True

    @property
    def reached(self):
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def _standard(row):
    return (row["Hq"], row["Hv"], row["K"], row["V"], row["B"]) == (16, 32, 128, 128, 1)


def _find(rows, **wanted):
    return next((row for row in rows if _standard(row) and all(row.get(key) == value for key, value in wanted.items())), None)


def _value(row, key):
    return None if row is None else row[key]


def share_bound(row):
    """The share of the peak that a case row is to reach, or None."""
    if row["T"] not in LENGTHS or row["threads"] != 1 or not _standard(row):
        return None
    return SHARES.get((row["op"], row["dtype"], row["implementation"]))


def _share_bars(rows):
    for (op, dtype, name), bound in SHARES.items():
        for tokens in LENGTHS:
            row = _find(rows, op=op, dtype=dtype, implementation=name, T=tokens, threads=1)
            yield Bar(f"{op} {dtype} {name} T={tokens}: share of peak", "", bound, _value(row, "share_of_peak"))


def _thread_bars(rows):
    for op in ("forward", "backward"):
        for dtype, name in (("f32", "cpu-avx512"), ("bf16", "cpu-avx512bf16")):
            for tokens in LENGTHS:
                one, two = (_find(rows, op=op, dtype=dtype, implementation=name, T=tokens, threads=n) for n in (1, 2))
                value = two["tokens_per_second"] / one["tokens_per_second"] if one and two else None
                yield Bar(f"{op} {dtype} {name} T={tokens}: two threads against one", "x", 1.8, value)


def _memory_bars(rows):
    for layout in ("key_value", "value_key"):
        row = _find(rows, op="recurrent", T=1, dtype="f32", state="f32", states="cold", layout=layout, threads=1)
        what = f"decode of one token, cold states {layout}: time / time to read and write the state"
        yield Bar(what, "x", 1.3, _value(row, "time_to_state_time"), at_least=False)
    for tokens in LENGTHS:
        row = _find(rows, op="forward", T=tokens, dtype="f32", threads=1)
        value = row["workspace_bytes"] / MIB if row else None
        yield Bar(f"forward T={tokens}: workspace a thread", " MiB", 2, value, at_least=False)
        row = _find(rows, op="backward", T=tokens, dtype="f32", threads=1)
        value = row["workspace_bytes"] / MIB if row else None
        bound = 2 + -(-tokens // 64) * STATE_BYTES / MIB
        yield Bar(f"backward T={tokens}: workspace, one fp32 state per 64 tokens + 2 MiB", " MiB", bound, value, at_least=False)


def _pytorch_bars(pytorch_rows):
    for tokens, bound in zip(LENGTHS, (5, 10), strict=True):
        row = _find(pytorch_rows, op="forward_backward", T=tokens, dtype="f32", threads=1)
        yield Bar(f"forward + backward f32 T={tokens}: against plain PyTorch", "x", bound, _value(row, "ratio"))


def all_bars(rows, pytorch_rows):
    """`rows`: case lines of flashqla_bench. `pytorch_rows`: as pytorch_cases.measure returns them."""
    return [*_share_bars(rows), *_thread_bars(rows), *_memory_bars(rows), *_pytorch_bars(pytorch_rows)]


def print_bars(bars):
    """Returns (reached, not reached, not measured)."""
    print("\nBars")
    counts = {True: 0, False: 0, None: 0}
    for bar in bars:
        counts[bar.reached] += 1
        verdict = {True: "reached", False: "NOT reached", None: "not measured"}[bar.reached]
        value = "-" if bar.value is None else f"{bar.value:.2f}{bar.unit}"
        bound = f"{'>=' if bar.at_least else '<='} {bar.bound:g}{bar.unit}"
        print(f"  {bar.what:<84} {value:>10} {bound:>10}  {verdict}")
    return counts[True], counts[False], counts[None]
