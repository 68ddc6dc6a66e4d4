"""The Python half of the benchmark on tiny cases: that it runs and counts right, not how fast anything is."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import bars  # noqa: E402
import pytorch_cases  # noqa: E402
import report  # noqa: E402

import bench  # noqa: E402

PEAKS = [{"threads": 1, "fp32_avx512_gflops": 1.0, "fp32_avx2_gflops": 1.0, "fp32_plain_gflops": 1.0, "bf16_dot_gflops": 1.0}]
STANDARD = {"B": 1, "T": 512, "Hq": 16, "Hv": 32, "K": 128, "V": 128, "dtype": "f32", "threads": 1}


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_cases_are_split_between_the_two_halves():
    lines, cases = bench.read_cases(ROOT / "tests/cases/bench.txt", short=False)
    assert lines and cases
    assert not any("through=" in line for line in lines)
    assert {case["op"] for case in cases} == {"forward", "backward", "forward_backward", "recurrent"}
    assert all(isinstance(case["T"], int) and case["dtype"] in pytorch_cases.DTYPES for case in cases)
    short_lines, short_cases = bench.read_cases(ROOT / "tests/cases/bench.txt", short=True)
    assert len(short_lines) == len(lines) and len(short_cases) < len(cases)
    assert not any("," in line for line in short_lines)


@pytest.mark.parametrize("op", ["forward", "backward", "forward_backward", "recurrent"])
def test_measure(op):
    case = {"B": 1, "T": 3, "Hq": 1, "Hv": 2, "K": 16, "V": 16, "dtype": "bf16", "threads": 1, "op": op}
    row = pytorch_cases.measure(case, seconds=0.01, peaks=PEAKS)
    assert row["rounds"] >= pytorch_cases.MIN_ROUNDS
    assert row["tokens_per_second"] == pytest.approx(3 / row["seconds"])
    assert row["ratio"] == pytest.approx(row["seconds_pytorch"] / row["seconds"])
    flops = {"forward": 7, "backward": 19, "forward_backward": 26, "recurrent": 7}[op] * 16 * 16 * 2 * 3
    assert row["gflops"] == pytest.approx(flops / row["seconds"] / 1e9)
    assert op in report.table_line(row, row["ratio"]).replace(" + ", "_")


def test_bars():
    forward = {**STANDARD, "op": "forward", "implementation": "cpu-avx512", "share_of_peak": 0.8, "tokens_per_second": 100.0}
    forward["workspace_bytes"] = 3 << 20
    other = {**forward, "threads": 2, "tokens_per_second": 170.0}
    pair = {**STANDARD, "op": "forward_backward", "ratio": 6.0}
    found = {bar.what: bar.reached for bar in bars.all_bars([forward, other], [pair])}
    assert found["forward f32 cpu-avx512 T=512: share of peak"] is True
    assert found["forward f32 cpu-avx512 T=2048: share of peak"] is None
    assert found["forward f32 cpu-avx512 T=512: two threads against one"] is False
    assert found["forward T=512: workspace a thread"] is False
    assert found["forward + backward f32 T=512: against plain PyTorch"] is True
    assert bars.share_bound(forward) == 0.75 and bars.share_bound(other) is None
