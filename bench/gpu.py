"""The GPU benchmark: flash_qla beside other libraries of the same operation, row by row of gpu_cases.txt, in turn.

    python bench/gpu.py --peer fla=FOLDER [--peer flashinfer=FOLDER ...] [--rows TEXT ...] [--commit HASH]

FOLDER: where `pip install --target FOLDER` put that library. Each library runs in a process of its own and sees its own
packages; where one is not given, its recorded figures (gpu_recorded.json) stand in the table, marked with a star. Per row:
the median of 30 replays of a CUDA graph of the call, host time and peak memory of an eager call, time of the first call. JSON
and a picture in bench/results; the JSON is rewritten after every row. Without a CUDA build of flash_qla, --programs FOLDER
takes our figures from flashqla_bench_cuda.
"""

import argparse
import datetime
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from gpu_cases import read_cases
from gpu_report import Report, draw

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROUNDS, REPLAYS = 3, 10
PEERS = ("fla", "flash-qla", "flashinfer")
LIMIT_S = 240  # of an answer; a first call may compile for minutes


class Library:
    """A process of gpu_worker.py."""

    def __init__(self, name, folder, device, log):
        self.name, self.log, self.silent = name, log, False
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-s", str(HERE / "gpu_worker.py"), name, str(folder), device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=HERE
        )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, **request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.silent = True

    def answer(self):
        """The next answer; {"refused": why} if there is none."""
        if not self.silent and self.selector.select(LIMIT_S):
            line = self.process.stdout.readline()
            if line:
                return json.loads(line)
        self.silent = True
        self.process.kill()
        return {"refused": f"no answer (exit code {self.process.wait()})"}

    def close(self):
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):  # it may have died, or hang
            self.process.kill()
        self.process.stdout.close()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=HERE / "gpu_cases.txt")
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name has one of these texts in it")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER", help=f"NAME: {', '.join(PEERS)}")
    parser.add_argument("--all-peers", action="store_true", help="peers in every row, not only in those marked peers=yes")
    parser.add_argument("--programs", type=Path, help="folder of flashqla_bench_cuda and flashqla_bench_cuda_decode")
    parser.add_argument("--device", default="cuda", help="cpu: rows so small that only the driver is tried")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--commit", help="of the tree, where there is no repository")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON and the picture")
    parser.add_argument("--name", help="name of both files (default: the device's)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is not reached")
    parser.add_argument("--dry-run", action="store_true", help="list the rows and their bytes")
    arguments = parser.parse_args()
    folders = dict(peer.partition("=")[::2] for peer in arguments.peer)
    for name, folder in folders.items():
        if name not in PEERS or not Path(folder).is_dir():
            parser.error(f"--peer {name}={folder}: NAME is one of {', '.join(PEERS)}, FOLDER a folder")
    arguments.folders = {name: Path(folder).resolve() for name, folder in folders.items()}
    return arguments


def chosen_cases(arguments):
    cases = read_cases(arguments.cases.read_text())
    if arguments.rows:
        cases = [case for case in cases if any(text in case.name for text in arguments.rows)]
    if not cases:
        raise SystemExit("no row has such a name; --dry-run lists them")
    return cases


def commit():
    """The commit of the tree, with a mark when it has changes; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def start_libraries(arguments, cases, log):
    """({(library, heads): Library}, hellos). Ours is one process, a peer one a number of heads: they compile side by side."""
    device = arguments.device
    libraries = {("ours", None): Library("ours", ROOT / "python", device, log)}
    for name, folder in arguments.folders.items():
        for heads in sorted({case.heads for case in cases if case.peers or arguments.all_peers}):
            libraries[name, heads] = Library(name, folder, device, log)
    hellos = {}
    for key in list(libraries):
        hello = libraries[key].answer()
        if "refused" in hello:
            libraries.pop(key).close()
            if key[0] not in hellos:
                print(f"{key[0]}: {hello['refused']}", flush=True)
        hellos.setdefault(key[0], hello)
    return libraries, hellos


def compile_ahead(libraries, cases):
    """Every peer's first call of every operation, all processes at once; returns {(library, heads, op): answer}."""
    begin, answers = time.perf_counter(), {}
    for op in ("forward", "backward", "decode"):
        waiting = []
        for (name, heads), library in libraries.items():
            case = next((case for case in cases if case.op == op and case.heads == heads), None)
            if name != "ours" and case:
                library.ask(prepare=asdict(case) | {"layers": 1})
                waiting.append((name, heads, library))
        for name, heads, library in waiting:
            answers[name, heads, op] = library.answer()
        for _, _, library in waiting:
            library.ask(drop=1)
            library.answer()
    print(f"peers compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    return answers


def measure(case, libraries):
    """{library: figures} of a row."""
    request = asdict(case) | {"layers": case.layers}
    figures = {}
    for name, library in libraries.items():
        library.ask(prepare=request)
        figures[name] = library.answer()
    running = {name: library for name, library in libraries.items() if "refused" not in figures[name]}
    times = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, library in running.items():
            library.ask(replay=REPLAYS)
            answer = library.answer()
            times[name] += answer.get("ms", [])
            if "refused" in answer:
                figures[name] = answer
    for name, values in times.items():
        if values and "refused" not in figures[name]:
            figures[name] |= {"ms": statistics.median(values) / case.layers, "ms_min": min(values) / case.layers}
    for library in libraries.values():
        library.ask(drop=1)
        library.answer()
    return figures


def program_figures(folder):
    """{row: figures} of the C++ programs."""
    rows = {}
    for program in ("flashqla_bench_cuda", "flashqla_bench_cuda_decode"):
        answer = subprocess.run([folder / program], capture_output=True, text=True)
        for line in answer.stdout.splitlines():
            entry = json.loads(line) | {"through": "C++"}
            name = entry.pop("row")
            if name.startswith("decode"):
                if name.endswith("value_key"):
                    continue
                name = f"decode (16,32) {name.split()[1]}"
                entry |= {"ms": entry.pop("us") / 1e3, "copy_ms": entry.pop("copy_us") / 1e3}
            elif not name.startswith("backward"):
                name = f"forward {name}"
            rows[name] = entry
    return rows


def run(arguments, cases, log):
    libraries, hellos = start_libraries(arguments, cases, log)
    ours = hellos["ours"]
    programs = program_figures(arguments.programs) if arguments.programs else {}
    report = Report(json.loads((HERE / "gpu_recorded.json").read_text()), tiny=arguments.device == "cpu")
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": arguments.commit or commit(),
        "command": " ".join(["python", "bench/gpu.py", *sys.argv[1:]]),
        "libraries": hellos,
        "recorded": report.source,
        "rows": report.rows,
    }
    device = next((hello["device"] for hello in hellos.values() if "device" in hello), arguments.device)
    name = arguments.name or "-".join(device.lower().split())
    begin = time.perf_counter()
    if len(libraries) > 1:
        result["first_calls"] = [
            {"library": key[0], "heads": key[1], "op": key[2], **answer}
            for key, answer in compile_ahead(libraries, cases).items()
        ]
    print(f"{device}, commit {result['commit']}, flash_qla {ours.get('version', '-')}", flush=True)
    report.print_header()
    for case in cases:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"time is up: {case.name} and what follows were not run", flush=True)
            break
        wanted = {
            key[0]: library
            for key, library in libraries.items()
            if key[1] is None or (key[1] == case.heads and (case.peers or arguments.all_peers))
        }
        figures = measure(case, wanted)
        if "ms" not in figures.get("ours", {}) and case.name in programs:
            figures["ours"] = programs[case.name]
        report.add(case, figures)
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    missed = report.print_end()
    result["bars"] = report.bars()
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(arguments.out / f"{name}.png", f"{device}, {result['date'][:10]}, commit {result['commit']}", report)
    print(f"written: {arguments.out / name}.json; {time.perf_counter() - begin:.0f} s", flush=True)
    for library in libraries.values():
        library.close()
    return 1 if arguments.check and missed else 0


def main():
    arguments = parse_arguments()
    cases = chosen_cases(arguments)
    if arguments.device == "cpu":
        cases = [case.tiny() for case in cases]
    if arguments.dry_run:
        for case in cases:
            print(f"{case.name:<56} {case.least_bytes / 1e6:>9.1f} MB at least{'   beside peers' if case.peers else ''}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "gpu.log", "w") as log:  # what the libraries say
        return run(arguments, cases, log)


if __name__ == "__main__":
    sys.exit(main())
