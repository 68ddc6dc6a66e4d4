#!/usr/bin/env python3
"""Prepares the checkout for building: .venv with the tools of requirements-dev.txt and a torch; googletest for the tests,
Boost.Context for the emulation of CUDA.

Run by make with the Python that the user chose. Needs the standard library only; takes a moment when there is nothing to do.
What a bare Debian or Ubuntu lacks (pip, googletest) is installed with apt by root, and unpacked into .deps by anybody else.
"""

import argparse
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
DEPS = os.path.join(ROOT, ".deps")
MARKER = os.path.join(VENV, "made-by-flashqla")  # present from the first moment; holds the stamp once everything is installed
REQUIREMENTS = os.path.join(ROOT, "requirements-dev.txt")
TORCH_FLOOR = (2, 10)
PREFIXES = ("/usr", "/usr/local", "/opt/homebrew", os.path.join(DEPS, "usr"))


def say(text):
    print("set-up: " + text, flush=True)


def fail(text):
    sys.exit("set-up: " + text)


def succeeds(command, **options):
    """Runs a command, shows its output only if it fails."""
    say(" ".join(command))
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, **options
    )
    if result.returncode:
        print(result.stdout[-3000:])
    return result.returncode == 0


def is_root():
    return hasattr(os, "geteuid") and os.geteuid() == 0


def apt_install(package):
    """Installs a Debian package as root. The package lists are fetched when the first try finds none."""
    if not (is_root() and shutil.which("apt-get")):
        return False
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
    return succeeds(install, env=environment) or (succeeds(["apt-get", "update", "-q"]) and succeeds(install, env=environment))


def apt_unpack(package):
    """Downloads a Debian package and unpacks it into .deps, which needs no rights."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return False
    os.makedirs(DEPS, exist_ok=True)
    if not succeeds(["apt-get", "download", package], cwd=DEPS):
        return False
    archives = glob.glob(os.path.join(DEPS, package + "_*.deb"))
    return bool(archives) and succeeds(["dpkg", "-x", archives[0], DEPS])


def check_compiler():
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        fail("no C++ compiler found (looked for {}). On Debian or Ubuntu: sudo apt-get install g++".format(", ".join(names)))


def ensure_library(header, package, need, unpack=True):
    def found():
        return any(os.path.exists(os.path.join(prefix, "include", header)) for prefix in PREFIXES)

    if os.environ.get("CMAKE_PREFIX_PATH") or found():
        return
    if not ((apt_install(package) or (unpack and apt_unpack(package))) and found()):
        fail(
            f"{need}. On Debian or Ubuntu: sudo apt-get install {package}; "
            "elsewhere set CMAKE_PREFIX_PATH to the folder where it is installed"
        )


def usable_torch():
    """(version, reason): the version of this Python's own torch if it will do, else None and why not."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, "no torch is installed for " + sys.executable
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return None, "the installed torch has the odd version " + version
    if numbers < TORCH_FLOOR:
        return None, "the installed torch {} is older than {}.{}".format(version, *TORCH_FLOOR)
    spec = importlib.util.find_spec("torch")
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    if not os.path.isdir(os.path.join(folder, "include/torch/csrc/stable")):
        return None, f"the installed torch {version} comes without its C++ headers"
    return version, ""


def stamp(torch_version):
    """What .venv depends on: made again when this changes."""
    with open(REQUIREMENTS, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    python = [os.path.realpath(sys.executable), sys.version]
    return {"python": python, "torch": torch_version, "requirements": digest, "root": ROOT}


def same_stamp(wanted, keys):
    try:
        with open(MARKER) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return False
    return all(found.get(key) == wanted[key] for key in keys)


def venv_python():
    return os.path.join(VENV, "bin", "python")


def add_pip():
    """Puts the pip of Debian's python3-pip-whl into .venv."""
    wheels = os.path.join(DEPS, "usr/share/python-wheels/pip-*.whl")
    if not glob.glob(wheels):
        apt_unpack("python3-pip-whl")
    found = glob.glob(wheels)
    return bool(found) and succeeds([venv_python(), os.path.join(found[0], "pip"), "install", "-q", "--no-index", found[0]])


def create_venv(system_packages):
    """An empty environment in .venv. Debian's Python has `venv` but, without the package python3-venv, no pip to put into it."""
    os.makedirs(VENV)
    open(MARKER, "w").close()
    apt_hint = "On Debian or Ubuntu: sudo apt-get install python{}.{}-venv".format(*sys.version_info[:2])
    if importlib.util.find_spec("ensurepip") is None:
        apt_install("python{}.{}-venv".format(*sys.version_info[:2]))
    with_pip = subprocess.run([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL).returncode == 0
    options = ["--system-site-packages"] if system_packages else []
    if importlib.util.find_spec("venv"):
        made = succeeds([sys.executable, "-m", "venv"] + options + ([] if with_pip else ["--without-pip"]) + [VENV])
    else:
        made = importlib.util.find_spec("virtualenv") and succeeds([sys.executable, "-m", "virtualenv", "-q"] + options + [VENV])
    if not made:
        fail("could not make a virtual environment. " + apt_hint)
    if not (os.path.exists(os.path.join(VENV, "bin", "pip")) or add_pip()):
        fail("there is no pip for the virtual environment. " + apt_hint)


def link_site_packages(name, folders):
    """Makes folders importable in .venv."""
    target = glob.glob(os.path.join(VENV, "lib", "python3*", "site-packages"))[0]
    with open(os.path.join(target, name), "w") as file:
        for folder in folders:
            file.write(f"import site; site.addsitedir({folder!r})\n")


def imports_torch():
    return succeeds([venv_python(), "-c", "import torch"])


def build_venv(own_torch):
    with open(REQUIREMENTS) as file:
        lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    tools = [line for line in lines if not line.startswith("torch==")]
    pinned_torch = next(line for line in lines if line.startswith("torch=="))
    quiet = ["--disable-pip-version-check", "--no-input"] + ([] if sys.stdout.isatty() else ["-q"])

    in_environment = sys.prefix != sys.base_prefix  # then a torch of its own is in its folder, not among the system's packages
    create_venv(system_packages=bool(own_torch) and not in_environment)
    pip = [venv_python(), "-m", "pip", "install", *quiet]
    if own_torch and in_environment:
        link_site_packages("flashqla-torch.pth", site.getsitepackages())
    say("installing the tools of requirements-dev.txt")
    # The user's own packages may satisfy a line without putting its program into .venv/bin, hence --ignore-installed.
    replace = ["--ignore-installed", "--no-warn-conflicts"] if own_torch else []
    if subprocess.run([*pip, *replace, *tools]).returncode:
        fail("pip could not install the tools (see above)")
    if not own_torch or not imports_torch():
        say(f"installing {pinned_torch} (once; 0.2 to 3 GB, depending on the build that the package index offers)")
        if subprocess.run([*pip, *replace, pinned_torch]).returncode or not imports_torch():
            fail(f"could not install {pinned_torch} (see above)")
    link_site_packages("flashqla-python.pth", [os.path.join(ROOT, "python")])


def ensure_venv():
    own_torch, reason = usable_torch()
    wanted = stamp(own_torch)
    if os.path.islink(VENV):
        fail(".venv is a symbolic link, and what it points to may serve others: remove the link, then run make again")
    if os.path.exists(VENV):
        if not os.path.exists(MARKER):
            fail(".venv exists but was not made by this script: move it away, then run make again")
        if same_stamp(wanted, wanted):
            return
        say("renewing .venv")
        shutil.rmtree(VENV)
    say("Python {}; {}".format(sys.version.split()[0], "using its own torch " + own_torch if own_torch else reason))
    build_venv(own_torch)
    with open(MARKER, "w") as file:
        json.dump(wanted, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tests", action="store_true", help="also what the C++ tests need (googletest)")
    parser.add_argument("--emulation", action="store_true", help="also what the emulation of CUDA needs (Boost.Context)")
    arguments = parser.parse_args()
    if sys.version_info < (3, 10):
        this = f"{sys.version.split()[0]} ({sys.executable})"
        fail(f"Python 3.10 or newer is needed, this is {this}. Name another one, such as: make PYTHON=python3.12 ...")
    check_compiler()
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        ensure_venv()
    elif not same_stamp(stamp(None), ["requirements", "root"]):  # inside .venv, which is out of date: start again from outside
        os.execv(sys._base_executable, [sys._base_executable, *sys.argv])
    if arguments.tests:
        ensure_library("gtest/gtest.h", "libgtest-dev", "the C++ tests need googletest")
    if arguments.emulation:
        ensure_library("boost/context/fiber.hpp", "libboost-context-dev", "the emulation of CUDA needs Boost.Context", False)


if __name__ == "__main__":
    main()
