"""The benchmark: runs flashqla_bench (the C++ library alone, the machine's peaks measured beside it) and flash_qla from PyTorch
against the plain PyTorch formulation; prints a table and the project's bars, writes JSON and a picture.

Cases: tests/cases/bench.txt. A line with `through=pytorch` is measured here, every other line by flashqla_bench.
"""

import argparse
import datetime
import itertools
import json
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT_SECONDS = 0.05  # a case, in the short mode
INTEGERS = ("B", "T", "Hq", "Hv", "K", "V", "threads")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/bench/flashqla_bench", help="the C++ benchmark")
    parser.add_argument("--cases", type=Path, default=ROOT / "tests/cases/bench.txt")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the JSON and the picture")
    parser.add_argument("--name", help="name of both files (default: the processor's; short, in the short mode)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for a case (default 1)")
    parser.add_argument(
        "--short", action="store_true", help="the first value of every list, a moment a case: does it run at all?"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is not reached")
    return parser.parse_args()


def read_cases(path, short):
    """(lines for flashqla_bench, cases to measure through PyTorch). Short: of each line the first combination only."""
    lines, cases = [], []
    for line in path.read_text().splitlines():
        words = dict(word.split("=", 1) for word in line.split("#")[0].split())
        if not words:
            continue
        if short:
            words = {key: value.split(",")[0] for key, value in words.items()}
        if words.pop("through", None) != "pytorch":
            lines.append(" ".join(f"{key}={value}" for key, value in words.items()))
            continue
        for values in itertools.product(*(value.split(",") for value in words.values())):
            case = {"B": 1, "threads": 1, **dict(zip(words, values, strict=True))}
            cases.append({key: int(value) if key in INTEGERS else value for key, value in case.items()})
    return lines, cases


def run_program(program, lines, seconds):
    """The JSON lines of flashqla_bench as (machine, case rows, refused rows); progress on screen."""
    if not program.is_file():
        raise SystemExit(f"{program} is missing: build it (make bench does) or give its place with --program")
    machine, rows, refused = {}, [], []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as cases, tempfile.TemporaryFile("w+") as messages:
        cases.write("\n".join(lines) + "\n")
        cases.flush()
        with subprocess.Popen([program, cases.name, str(seconds)], stdout=subprocess.PIPE, stderr=messages, text=True) as process:
            for line in process.stdout:
                entry = json.loads(line)
                kind = entry.pop("kind")
                if kind == "machine":
                    machine = entry
                elif kind == "case":
                    rows.append(entry)
                    print(f"  {len(rows):>3} {entry['case']}: {entry['tokens_per_second']:,.0f} tokens/s", flush=True)
                else:
                    refused.append(entry)
                    print(f"      {entry['case']}: {entry['reason']}", flush=True)
        if process.returncode:
            messages.seek(0)
            raise SystemExit(f"{messages.read()}{program} ended with exit code {process.returncode}")
    return machine, rows, refused


def commit():
    """The commit of the tree, with a mark when it has changes; None outside a repository."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return None
    return answer.stdout.strip() or None


def main():
    arguments = parse_arguments()
    seconds = SHORT_SECONDS if arguments.short else arguments.seconds
    lines, cases = read_cases(arguments.cases, arguments.short)
    print(f"flashqla_bench: {len(lines)} lines of cases, {seconds:g} s a case", flush=True)
    machine, rows, refused = run_program(arguments.program, lines, seconds)

    import torch
    from bars import all_bars, print_bars
    from pytorch_cases import measure
    from report import draw, print_rows

    import flash_qla

    print(f"PyTorch {torch.__version__}: {len(cases)} cases", flush=True)
    pytorch_rows = []
    for case in cases:
        pytorch_rows.append(measure(case, seconds, machine.get("peaks", [])))
        print(f"  {len(pytorch_rows):>3} {case}: {pytorch_rows[-1]['ratio']:.1f}x", flush=True)
    bars = all_bars(rows, pytorch_rows)
    print_rows(rows, pytorch_rows)
    reached, missed, without = print_bars(bars)

    processor = re.sub(r"[^a-z0-9]+", "-", machine["processor"].lower()).strip("-")
    name = arguments.name or ("short" if arguments.short else processor)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python", "bench/bench.py", *sys.argv[1:]]),
        "versions": {"flash_qla": flash_qla.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "system": platform.system(),
        "machine": machine,
        "cases": rows,
        "refused": refused,
        "pytorch": pytorch_rows,
        "bars": [{**asdict(bar), "reached": bar.reached} for bar in bars],
    }
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(
        arguments.out / f"{name}.png",
        f"{machine['processor']}, {result['date'][:10]}, commit {result['commit'] or 'unknown'}",
        rows,
        pytorch_rows,
    )
    print(f"\nWritten: {arguments.out / name}.json and .png")
    print(f"bars: {reached} reached, {missed} not reached, {without} not measured")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
