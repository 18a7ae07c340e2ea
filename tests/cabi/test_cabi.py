"""fserver.h and the archive: the header compiles alone, every function of it is there, and the
cases of abi_test.c."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADER = ROOT / "engine/cabi/fserver.h"
ARCHIVE = Path(os.environ.get("FSERVER_ARCHIVE") or ROOT / "build/libfserver.a").resolve()
CASES = re.findall(r"^CASE\((\w+)\) \{", (HERE / "abi_test.c").read_text(), re.MULTILINE)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(name: str, folder: Path) -> Path:
    """Builds NAME*.c of this folder into a program."""
    assert ARCHIVE.is_file(), "the archive has not been built: make engine"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    # The GPU driver's functions are bound when they are first used, as fserver.h says.
    flags += ["-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-in-object-files"]
    flags += ["-Wl,--export-dynamic", f"-I{HEADER.parent}", "-o", str(folder / name)]
    run("gcc", *flags, *sorted(HERE.glob(f"{name}*.c")), ARCHIVE, "-lresolv")
    return folder / name


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("abi_test", tmp_path_factory.mktemp("cabi"))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("mesh", tmp_path_factory.mktemp("cabi"))


@pytest.mark.parametrize("case", CASES)
def test_case(program: Path, case: str) -> None:
    run(program, case)


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_mesh(mesh: Path, transport: str) -> None:
    """2 workers and 2 servers: all sizes, a burst of 10,000 requests, kill -9 of some, and channels
    that the engine carries, with one of each role killed in the middle."""
    sizes = "1,7,48,4096,65537,1048576,16777216"
    for work in (
        ("exchange", "--sizes", sizes, "--count", "7"),
        ("exchange", "--sizes", "1,64,1000", "--count", "2500", "--open", "4096", "--keys", "64"),
        ("exchange", "--command", "sleep 0.1", "--times", "3"),
        ("kill", "--times", "4"),
        ("carry", "--count", "200", "--times", "2"),
    ):
        out = run(mesh, *work, "--transport", transport)
        assert "0 hangs, 0 wrong bytes, 0 other ends" in out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("exchange", "--spoil", "20"), "0 hangs, 4 wrong bytes, 0 other ends"),
        (("carry", "--spoil", "20"), "0 hangs, 8 wrong bytes, 0 other ends"),
        (("disturb", "--command", "set -- $PIDS; kill -9 $2"), "0 hangs, 0 wrong bytes, 1 other"),
        (("disturb", "--command", "set -- $PIDS; kill -STOP $4", "--limit", "5"), "1 hangs"),
        (("disturb", "--command", "exit 7"), "1 other ends"),
        (("exchange", "--command", "exit 7"), "1 other ends"),
    ],
)
def test_mesh_finds(mesh: Path, options: tuple[str, ...], part: str) -> None:
    """The program that compares finds a wrong byte, a member that dies or stops, and a
    command that fails."""
    done = subprocess.run([mesh, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert part in done.stdout


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("exchange", "--keys", "2"), "--keys 2: want a whole number from 3 to 4096"),
        (("exchange", "--sizes", "1,x"), "--sizes x: want a whole number"),
        (("kill", "--sizes", "8"), "--sizes 8: want 48 or more"),
        (("disturb",), "--command is not given: want"),
        (("kill", "--command", "true"), "--command true: want"),
        (("meet",), "usage: mesh"),
    ],
)
def test_mesh_wrong_options(mesh: Path, options: tuple[str, ...], part: str) -> None:
    done = subprocess.run([mesh, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert part in done.stderr


@pytest.mark.parametrize(
    "compiler", [("gcc", "-std=c99", "-x", "c"), ("g++", "-std=c++17", "-x", "c++")]
)
def test_header_compiles_alone(compiler: tuple[str, ...]) -> None:
    run(*compiler, "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", HEADER)


def test_every_function_is_there() -> None:
    prototypes = re.sub("//.*", "", HEADER.read_text())
    declared = set(re.findall(r"\b(fs_\w+)\(", prototypes))
    defined = set(re.findall(r" T (fs_\w+)$", run("nm", "--defined-only", ARCHIVE), re.MULTILINE))
    assert declared == defined
