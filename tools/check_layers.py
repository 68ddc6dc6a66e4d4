#!/usr/bin/env python3
"""Checks rules of the tree that no compiler checks: who may include whom, sizes of files and functions, forbidden text.

    bindings/torch -> include/flashqla <- src/api -> src/dispatch -> { src/cpu, src/cuda, src/reference } -> src/common
    inside src/cuda: kernels -> { block -> tile -> ptx, views, host }

An arrow means "may include". An implementation may also see src/dispatch/implementation.hpp, the shape of its row in the table.
Prints one line a violation and exits with 1 if there is any.
"""

import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
CPP = {".hpp", ".cpp", ".inl", ".cuh", ".cu"}

# Folder -> what its files may include, as prefixes of the include path. The first match counts. Headers of the standard library
# (no slash in their name) are allowed everywhere.
PUBLIC = ("flashqla/",)
IMPLEMENTATION = PUBLIC + ("common/", "dispatch/implementation.hpp")
ALLOWED = [
    ("include/", PUBLIC),
    ("src/common/", PUBLIC + ("common/",)),
    ("src/reference/", IMPLEMENTATION + ("reference/",)),
    ("src/cpu/simd/", PUBLIC + ("common/", "cpu/simd/")),
    ("src/cpu/kernels/", IMPLEMENTATION + ("cpu/simd/", "cpu/kernels/", "cpu/")),
    ("src/cpu/", IMPLEMENTATION + ("cpu/",)),
    ("src/cuda/ptx/", ("cuda/ptx/",)),
    ("src/cuda/tile/", ("cuda/ptx/", "cuda/tile/")),
    ("src/cuda/views/", PUBLIC + ("cuda/ptx/", "cuda/views/")),
    ("src/cuda/block/", PUBLIC + ("cuda/ptx/", "cuda/tile/", "cuda/views/", "cuda/block/")),
    ("src/cuda/host/", PUBLIC + ("common/", "cuda/views/", "cuda/host/")),
    ("src/cuda/", IMPLEMENTATION + ("cuda/",)),
    ("src/dispatch/", PUBLIC + ("common/", "dispatch/", "cpu/", "cuda/", "reference/")),
    ("src/api/", PUBLIC + ("common/", "dispatch/", "api/")),
    ("bindings/torch/", PUBLIC + ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/", "torch/headeronly/")),
    ("examples/", PUBLIC),
    ("tests/install/", PUBLIC),
]
SYSTEM = ("sys/",)  # the only <x/y> headers besides the table's

FORBIDDEN = [
    (re.compile(r"/(root|home)/[a-z.]|/tmp/[a-z]"), "path of somebody's machine"),
    (re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"), "unfinished work marked in the text"),
]
FORBIDDEN_FLAGS = re.compile(r"(?<![\w\"`])-(march|mtune|ffast-math|Ofast)\b")


def tracked_files():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def check_includes(name, lines):
    allowed = next((prefixes for folder, prefixes in ALLOWED if name.startswith(folder)), None)
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", line)
        if not match:
            continue
        bracket, path = match.groups()
        if ".." in path.split("/"):
            yield number, f"include path with '..': {path}"
        elif allowed is None or any(path.startswith(prefix) for prefix in allowed):
            continue
        elif bracket == "<" and ("/" not in path or path.startswith(SYSTEM)):
            continue  # the standard library, the system, intrinsics
        elif bracket == '"' and "/" not in path and (ROOT / name).with_name(path).is_file() and not name.startswith("include/"):
            continue  # a neighbour in the same folder
        else:
            yield number, f"may not include {path}; allowed here: {', '.join(allowed)}"


def check_public_standard_headers(name, lines):
    """Public headers: standard C++ only, whose headers have no '.h'."""
    if name.startswith("include/"):
        for number, line in enumerate(lines, 1):
            match = re.match(r"\s*#\s*include\s*<([^>]+)>", line)
            if match and re.search(r"\.h$|cuda|torch", match.group(1)):
                yield number, f"public headers include only the standard library, not <{match.group(1)}>"


def cpp_functions(lines):
    """(first line, length) of each function. Files are formatted, so a block ends at the line that closes it in its column."""
    not_function = re.compile(r"^\s*(inline )?(namespace|struct|class|enum|union|extern \"C\")\b|^\s*template|=\s*\{$")
    open_block = None
    for number, line in enumerate(lines, 1):
        indent = len(line) - len(line.lstrip())
        if open_block is None and indent <= 4 and line.rstrip().endswith("{") and not not_function.search(line):
            open_block = (number, indent)
        elif open_block and indent == open_block[1] and line.lstrip().startswith("}"):
            yield open_block[0], number - open_block[0] + 1
            open_block = None


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # What a user reads, the parameters and the docstring, does not count: a public function documents every argument.
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.lineno, node.end_lineno - body[0].lineno + 1 if body else 0


def check_sizes(path, text, lines):
    if len(lines) > MAX_FILE_LINES:
        yield 1, f"{len(lines)} lines, at most {MAX_FILE_LINES}: split by role"
    functions = python_functions(text) if path.suffix == ".py" else cpp_functions(lines)
    for number, length in functions:
        if length > MAX_FUNCTION_LINES:
            yield number, f"function of {length} lines, at most {MAX_FUNCTION_LINES}"


def check_text(name, lines):
    builds = name.endswith((".cmake", "CMakeLists.txt", "Makefile"))
    for number, line in enumerate(lines, 1):
        for pattern, meaning in FORBIDDEN:
            if pattern.search(line):
                yield number, meaning
        if builds and not line.lstrip().startswith("#") and FORBIDDEN_FLAGS.search(line):
            yield number, "no -march, -mtune or -ffast-math: instruction sets are opened per region, numerics stay visible"


def check_file(path):
    name = path.relative_to(ROOT).as_posix()
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return  # a picture
    lines = text.splitlines()
    yield from check_text(name, lines)
    if path.suffix in CPP:
        yield from check_includes(name, lines)
        yield from check_public_standard_headers(name, lines)
    if path.suffix in CPP or path.suffix == ".py":
        yield from check_sizes(path, text, lines)


def main():
    files = tracked_files()
    violations = [f"{path.relative_to(ROOT)}:{number}: {message}" for path in files for number, message in check_file(path)]
    print("\n".join(violations) if violations else f"check_layers: {len(files)} files, no violation")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
