#!/usr/bin/env python3
"""Holds every kernel to the committed table of what the compiler made of it: registers, stack, spills, static shared memory.

    tools/check_ptxas.py BUILD             compares the build with src/cuda/ptxas.txt
    tools/check_ptxas.py BUILD --update    writes the table from the build

A kernel that needs more of anything, a new kernel and a remark of ptxas that the table does not have (wgmma serialised,
setmaxnreg ignored, ...) fail. Less is told. More registers fail with the table's compiler only: another spreads them otherwise.
A source file may take a minute of processor time. Reads the reports that tools/keep_ptxas leaves beside the objects.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/cuda/ptxas.txt"
SOURCES = "src/cuda"
MAX_SECONDS = 60.0
KNOWN = re.compile(r"ptxas info +: (\d+ bytes gmem|Compiling entry function|Function properties|Used |Compile time)")
HEADER = """\
# What nvcc made of every kernel, a line each: architecture, registers a thread, bytes of stack, of spill stores, of spill loads
# and of static shared memory, name. Written by `tools/check_ptxas.py build/cuda --update`; a build that needs more fails.
"""
COLUMNS = f"{'# arch':<8} {'registers':>9} {'stack':>6} {'stores':>6} {'loads':>6} {'shared':>6}  kernel"


@dataclass
class Resources:
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


def short_name(demangled):
    """`void a::b::kernel<(int)64, a::X>(P)` -> `kernel<64, X>`."""
    name = re.sub(r"^void ", "", demangled.replace("(anonymous namespace)::", ""))
    name = re.sub(r"\((?:int|unsigned int|long|bool|[\w:]+)\)(?=\d)", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    name = re.sub(r"\b\w+::", "", name)
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "f16")


def demangle(names):
    if not names:
        return {}
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: short_name(text) for name, text in zip(names, plain, strict=True)}


def read_report(text):
    """{(architecture, mangled name): Resources}, remarks [(architecture, text)], seconds of the compile.

    Functions that a kernel calls have no registers of their own; they are there if they have a stack or spills.
    """
    kernels, remarks, seconds, arch, name = {}, [], 0.0, "", ""
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, arch = match.groups()
        elif match := re.search(r"Function properties for '?(\w+)", line):
            name = match.group(1)
        elif match := re.match(r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            row = kernels.setdefault((arch, name), Resources())
            row.stack, row.spill_stores, row.spill_loads = map(int, match.groups())
        elif match := re.search(r"Used (\d+) registers", line):
            row = kernels.setdefault((arch, name), Resources())
            row.registers = int(match.group(1))
            shared = re.search(r"(\d+) bytes smem", line)
            row.shared = int(shared.group(1)) if shared else 0
        elif match := re.match(r"seconds ([\d.]+) ([\d.]+)", line):
            seconds = float(match.group(1)) + float(match.group(2))
        elif line.startswith("ptxas") and not KNOWN.match(line):
            remarks.append((arch, line))
    return {key: row for key, row in kernels.items() if any(astuple(row))}, remarks, seconds


def read_build(build):
    """Kernels {(source, architecture, name): Resources}, remarks {(source, architecture, text)}, seconds {source: s}."""
    kernels, remarks, seconds = {}, set(), {}
    for source in sorted((ROOT / SOURCES).rglob("*.cu")):
        name = source.relative_to(ROOT).as_posix()
        report = build / "CMakeFiles/flashqla_cuda.dir" / f"{name}.o.ptxas"
        if not report.is_file():
            sys.exit(f"check_ptxas: {report} is missing; build first (make cuda)")
        of_file, said, seconds[name] = read_report(report.read_text())
        plain = demangle(sorted({mangled for _, mangled in of_file}))
        for (arch, mangled), row in of_file.items():
            kernels[name, arch, plain[mangled]] = row
        for arch, text in said:
            for mangled, short in demangle(sorted(set(re.findall(r"_Z\w+", text)))).items():
                text = text.replace(mangled, short)
            remarks.add((name, arch, re.sub(r"\s+", " ", text)))
    return kernels, remarks, seconds


def compiler_of(build):
    cache = (build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", cache, re.M).group(1)
    words = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return "nvcc " + re.search(r"release ([\d.]+)", words).group(1)


def read_table(text):
    """The compiler's name, kernels and remarks of a table, in the form of read_build."""
    compiler, kernels, remarks, source = "", {}, set(), ""
    for line in text.splitlines():
        if line.startswith("compiler "):
            compiler = line.removeprefix("compiler ")
        elif line.startswith("["):
            source = line.strip("[]")
        elif line.startswith("remark "):
            _, arch, words = line.split(" ", 2)
            remarks.add((source, arch, words))
        elif line and not line.startswith("#"):
            arch, *numbers, name = line.split(None, 6)
            kernels[source, arch, name] = Resources(*map(int, numbers))
    return compiler, kernels, remarks


def table_text(compiler, kernels, remarks):
    lines = [HEADER + f"compiler {compiler}", COLUMNS]
    for source in sorted({key[0] for key in kernels}):
        lines.append(f"[{source}]")
        for (_, arch, name), row in sorted((item for item in kernels.items() if item[0][0] == source), key=lambda x: x[0][::-1]):
            r, stack, stores, loads, shared = astuple(row)
            lines.append(f"{arch:<8} {r:>9} {stack:>6} {stores:>6} {loads:>6} {shared:>6}  {name}")
        lines += [f"remark {arch} {words}" for of, arch, words in sorted(remarks) if of == source]
    return "\n".join(lines) + "\n"


def compare(built, table, compiler):
    """What fails, what is only told: two lists of lines."""
    kernels, remarks = built
    table_compiler, expected, expected_remarks = table
    fails, told = [], []
    known = {arch for _, arch, _ in expected}
    built_archs = {arch for _, arch, _ in kernels}
    for arch in sorted(built_archs - known):
        told.append(f"{arch} is not in the table: not compared")
    if compiler != table_compiler:
        told.append(f"the table is {table_compiler}'s, this build {compiler}'s: registers are told only")
    for key, row in kernels.items():
        source, arch, name = key
        if arch not in known:
            continue
        where = f"{source}: {name} ({arch})"
        if key not in expected:
            fails.append(f"{where}: not in the table")
            continue
        for what, now in vars(row).items():
            before = getattr(expected[key], what)
            line = f"{where}: {what.replace('_', ' ')} {before} -> {now}"
            if now > before:
                (told if what == "registers" and compiler != table_compiler else fails).append(line)
            elif now < before:
                told.append(line)
    told += [f"{s}: {name} ({arch}): gone" for s, arch, name in expected.keys() - kernels.keys() if arch in built_archs]
    fails += [f"{source} ({arch}): {words}" for source, arch, words in sorted(remarks - expected_remarks)]
    return fails, told


def summary(kernels, remarks, seconds):
    spilling = sum(1 for row in kernels.values() if row.spill_stores or row.spill_loads)
    slowest = max(seconds, key=seconds.get)
    return (
        f"ptxas: {len({key[::2] for key in kernels})} kernels, {len(kernels)} with their architectures, {spilling} spill, "
        f"{len(remarks)} remarks; slowest file {slowest}, {seconds[slowest]:.0f} s"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the build's folder, such as build/cuda")
    parser.add_argument("--update", action="store_true", help="write the table from the build")
    args = parser.parse_args()
    compiler = compiler_of(args.build)
    kernels, remarks, seconds = read_build(args.build)
    if args.update:
        TABLE.write_text(table_text(compiler, kernels, remarks))
    fails, told = compare((kernels, remarks), read_table(TABLE.read_text()), compiler)
    fails += [f"{name}: compiled in {s:.0f} s; {MAX_SECONDS:.0f} are allowed" for name, s in seconds.items() if s > MAX_SECONDS]
    for line in told:
        print(f"  {line}")
    for line in fails:
        print(f"  FAILS: {line}")
    print(summary(kernels, remarks, seconds))
    if fails:
        print(f"Right as it is now? Then: tools/check_ptxas.py {args.build} --update, and say why in the commit.")
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main())
