"""The GPU benchmark's driver, without a GPU: rows, table, bars, and processes of two libraries that are both ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import gpu_cases  # noqa: E402
import gpu_report  # noqa: E402

CASES = gpu_cases.read_cases((BENCH / "gpu_cases.txt").read_text())
RECORDED = json.loads((BENCH / "gpu_recorded.json").read_text())


def test_rows_have_names_of_their_own_and_every_recorded_figure_a_row():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert set(RECORDED) - {"source"} <= set(names)
    assert all({"fla", "flash-qla", "flashinfer"} >= set(RECORDED[name]) for name in names if name in RECORDED)


@pytest.mark.parametrize(
    ("line", "name", "tokens"),
    [
        ("op=forward heads=16,64 lengths=4x8192", "forward (16,64) 4x8192", 32768),
        ("op=forward heads=2,8 lengths=32768+2x512", "forward (2,8) 32768 + 2x512", 33792),
        ("op=backward heads=2,4 lengths=1x64 undecayed=0 # words", "backward (2,4) 1x64, every head decaying", 64),
        ("op=decode heads=16,32 requests=3", "decode (16,32) B=3", 3),
    ],
)
def test_parse(line, name, tokens):
    case = gpu_cases.parse_case(line)
    assert (case.name, case.tokens, len(case.lengths)) == (name, tokens, {64: 1, 33792: 3, 32768: 4, 3: 3}[tokens])
    assert case.packed == ("+" in line) and case.tiny().tokens <= max(tokens // 100, 3)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="not a row"):
        gpu_cases.parse_case("op=forward heads=1,1 lengths=1x1 peer=yes")


def test_bytes():
    case = gpu_cases.parse_case("op=forward heads=2,4 lengths=1x10")
    assert case.least_bytes == 10 * ((2 * 2 + 2 * 4) * 256 + 4 * 8) + 2 * 4 * 128 * 128 * 4


def report_with(figures, name="forward (16,32) 1x2048"):
    report = gpu_report.Report(RECORDED)
    report.add(next(case for case in CASES if case.name == name), figures)
    return report


def test_recorded_figures_stand_in_and_are_marked(capsys):
    report = report_with({"ours": {"ms": 0.07, "host_us": 50.0}, "fla": {"refused": "no such device"}})
    assert "0.1400*" in capsys.readouterr().out
    found = {bar["what"]: bar["reached"] for bar in report.bars()}
    assert found == {
        "forward (16,32) 1x2048: against fla": True,
        "forward (16,32) 1x2048: host time": True,
        "forward: memory beyond inputs and outputs, of the outputs": None,
    }
    assert gpu_report.ratio(report.rows[0]) == pytest.approx(2)


def test_measured_figures_come_first_and_bars_count(capsys):
    ours = {"ms": 0.2, "host_us": 70.0, "extra_bytes": 300, "output_bytes": 100, "norms": [1.0, 2.0]}
    report = report_with({"ours": ours, "fla": {"ms": 0.154, "norms": [1.0, 2.1]}})
    assert "5.0 %" in capsys.readouterr().out
    assert report.print_end() == 3
    assert "fla in this run / recorded: 1.10" in capsys.readouterr().out


def test_decode_bar():
    report = report_with({"ours": {"ms": 0.0079}}, "decode (16,32) B=1")
    assert report.bars()[0]["reached"] and report.bars()[0]["unit"] == " us"


def test_no_figure_of_ours(capsys):
    report = report_with({"ours": {"refused": "no device"}})
    report.print_end()
    assert all(bar["reached"] is None for bar in report.bars())


def run_driver(*arguments):
    command = [sys.executable, str(BENCH / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_dry_run():
    answer = run_driver("--dry-run", "--rows", "(2,8)", "decode")
    assert answer.returncode == 0 and len(answer.stdout.splitlines()) == sum("(2,8)" in c.name or c.op == "decode" for c in CASES)
    assert "no row" in run_driver("--dry-run", "--rows", "nothing").stderr
    assert "NAME is one of" in run_driver("--peer", "fla=/nowhere").stderr


def test_two_processes_take_turns(tmp_path):
    cases = tmp_path / "cases.txt"
    cases.write_text(
        "op=forward heads=2,4 lengths=1000+2000 peers=yes\nop=backward heads=2,4 lengths=2x1024 peers=yes\n"
        "op=decode heads=2,4 requests=2 peers=yes\n"
    )
    peers = ("--peer", f"flash-qla={ROOT / 'python'}", "--peer", f"fla={tmp_path}")
    answer = run_driver("--device", "cpu", "--cases", cases, "--out", tmp_path, "--commit", "abc", *peers)
    assert answer.returncode == 0, answer.stderr
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["commit"] == "abc" and "refused" in result["libraries"]["fla"]
    assert len(result["rows"]) == 3 and (tmp_path / "cpu.png").is_file()
    for row in result["rows"][:2]:
        for library in ("ours", "flash-qla"):
            figures = row["figures"][library]
            assert figures["ms"] > 0 and figures["first_ms"] > 0 and figures["host_us"] > 0
        assert row["differs"]["flash-qla"] == 0  # the same library, the same data
        assert row["figures"]["ours"]["implementation"].startswith("cpu-")
    assert "no decode" in result["rows"][2]["figures"]["flash-qla"]["refused"]
    assert "no decode" in answer.stdout


def test_a_process_that_dies_is_a_refusal(tmp_path):
    """A library that ends the process in its first call."""
    package = tmp_path / "flash_qla"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n__version__ = '0'\ndef chunk_gated_delta_rule(*args, **kwargs):\n    os._exit(3)\n"
    )
    rows = ("--rows", "(16,32) 1x2048", "(16,32) 8x1024")
    answer = run_driver("--device", "cpu", *rows, "--out", tmp_path, "--peer", f"flash-qla={tmp_path}")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert len(rows) == 2 and all("ms" in row["figures"]["ours"] for row in rows)
    assert all("no answer" in row["figures"]["flash-qla"]["refused"] for row in rows)
