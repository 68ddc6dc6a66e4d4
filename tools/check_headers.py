#!/usr/bin/env python3
"""Checks that every header compiles alone, public ones with nothing but -Iinclude (so without torch, CUDA or anything of src).

The compiler is $CXX, else c++.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = [
    "-std=c++20",
    "-fsyntax-only",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wno-sign-conversion",
    "-Werror",
    "-x",
    "c++",
    "-",
]


def generated_headers(folder):
    """The headers that the build generates: version.hpp."""
    version = (ROOT / "VERSION").read_text().strip()
    header = (ROOT / "include/flashqla/version.hpp.in").read_text().replace("@PROJECT_VERSION@", version)
    (folder / "flashqla").mkdir()
    (folder / "flashqla/version.hpp").write_text(header)


def torch_include():
    spec = importlib.util.find_spec("torch")
    return pathlib.Path(spec.origin).parent / "include"


def compile_alone(header, include_folders, system_folders=()):
    """Includes the header twice in an otherwise empty file: it must be complete and guarded."""
    folders = [f"-I{folder}" for folder in include_folders] + [f"-isystem{folder}" for folder in system_folders]
    command = [*os.environ.get("CXX", "c++").split(), *folders, *FLAGS]
    source = f'#include "{header}"\n#include "{header}"\n'
    result = subprocess.run(command, input=source, text=True, capture_output=True, cwd=ROOT)
    return header, result.returncode, result.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-j", type=int, default=os.cpu_count())
    parser.add_argument("--torch", action="store_true", help="also those of bindings/torch (this Python has a torch)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        generated = pathlib.Path(temporary)
        generated_headers(generated)
        public = [ROOT / "include", generated]
        jobs = [(header, public) for header in sorted((ROOT / "include").rglob("*.hpp"))]
        for folder in ("src", "tests", "bench"):
            folders = [*public, ROOT / "src", ROOT / "tests/cpp", ROOT / "tests/cuda", ROOT, ROOT / "tests/emulation/include"]
            jobs += [(header, folders) for header in sorted((ROOT / folder).rglob("*.hpp"))]
        if arguments.torch:
            folders = [*public, ROOT / "bindings/torch"]
            jobs += [(header, folders, [torch_include()]) for header in sorted((ROOT / "bindings").rglob("*.hpp"))]
        with concurrent.futures.ThreadPoolExecutor(arguments.j) as pool:
            results = list(pool.map(lambda job: compile_alone(*job), jobs))
    failures = [result for result in results if result[1]]
    for header, _, errors in failures:
        print(f"{header.relative_to(ROOT)} does not compile alone:\n{errors[:2000]}")
    print(f"check_headers: {len(results)} headers, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
