#!/usr/bin/env python3
"""Writes docs/api/python.md from the signatures and docstrings of flash_qla; --check says whether the page is current.

Reads the sources, so neither torch nor a build is needed.
"""

import argparse
import ast
import inspect
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/flash_qla"
PAGE = ROOT / "docs/api/python.md"
HEAD = """# Python API

<!-- Written by tools/api_reference.py from the docstrings: change those, then run `make api-reference`. -->

`import flash_qla`. All functions take and return torch tensors, those of a call on one device: the CPU or a CUDA device.
Importing the package never fails and starts nothing. On a CUDA device a call puts its work on torch's current stream there and
returns; it reads no contents of tensors on the host and can be captured in a graph. `explain` says what an operation lacks there.
The formulas are in [math.md](../math.md). Every function is also importable from where the libraries it can stand in for have it,
such as `flash_qla.ops.gated_delta_rule.chunk_gated_delta_rule`. The environment variables are those of the [C++ API](cpp.md).
"""
# (section, names in the order of the page)
SECTIONS = [
    ("Training and prefill", ["chunk_gated_delta_rule"]),
    ("Decoding", ["fused_recurrent_gated_delta_rule"]),
    ("Serving: pools of states", ["recurrent_gated_delta_rule_pool", "chunk_gated_delta_rule_pool", "num_checkpoints"]),
    ("Low-level forward and backward", ["chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"]),
    ("What would run", ["explain", "device_support"]),
    ("Helpers", ["l2norm"]),
]


def functions():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name] = (path, node)
    return found


def signature(node):
    """One argument a line where all do not fit on one."""
    parts = [re.sub(r"(?<=: )(.+)=", r"\1 = ", part.strip()) for part in re.split(r", (?![^\[]*\])", ast.unparse(node.args))]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(parts)}){returns}"
    return line if len(line) <= 100 else f"{node.name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def markdown(docstring):
    """Args become lists; examples and indented formulas become code."""
    out, section, code = [], None, False
    for line in docstring.splitlines():
        starts_code = line.startswith((">>>", "    S <-"))
        if starts_code and not code:
            out.append("```python" if line.startswith(">>>") else "```")
            code = True
        elif code and not line.strip():
            out.append("```")
            code = False
        if code:
            out.append(line.removeprefix("    ") if not line.startswith((">>>", "...")) and out[-1] == "```" else line)
        elif re.fullmatch(r"(Args|Returns|Raises):", line):
            section = line[:-1]
            out += [f"**{'Arguments' if section == 'Args' else section}**", ""]
        elif section and line.startswith("    "):
            item = re.match(r"    (\w[\w, ]*): (.*)", line) if section in ("Args", "Raises") else None
            out.append(f"- `{item[1]}`: {item[2]}" if item else ("  " if section != "Returns" else "") + line.strip())
        else:
            section = section if not line.strip() else None
            out.append(line.replace("::", ":") if line.endswith("::") else line)
    lines = [*out, "```"] if code else out
    return "\n".join(line if line.startswith("```") else line.replace("``", "`") for line in lines).strip()


def page():
    found = functions()
    lines = [HEAD]
    for section, names in SECTIONS:
        lines.append(f"## {section}\n")
        for name in names:
            path, node = found[name]
            module = ".".join(["flash_qla", *path.relative_to(PACKAGE).with_suffix("").parts])
            prefix = "flash_qla." if f'"{name}"' in (PACKAGE / "__init__.py").read_text() else module.rsplit(".", 1)[0] + "."
            docstring = inspect.cleandoc(ast.get_docstring(node))
            lines.append(f"### {prefix}{name}\n\n```python\n{signature(node)}\n```\n\n{markdown(docstring)}\n")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        if PAGE.read_text() != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run make api-reference")
        print(f"{PAGE.relative_to(ROOT)} is current")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
