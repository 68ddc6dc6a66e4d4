"""Code that must run in a process of its own."""

import os
import subprocess
import sys
import textwrap


def run_python(code: str, *arguments: str, **environment) -> str:
    """stdout of a new process; stderr joins the failure."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd="/", env={**os.environ, **environment}, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
