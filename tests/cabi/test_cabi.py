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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cabi") / "abi_test"
    assert ARCHIVE.is_file(), "the archive has not been built: make engine"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    # The GPU driver's functions are bound when they are first used, as fserver.h says.
    flags += ["-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-in-object-files"]
    flags += ["-Wl,--export-dynamic"]
    run("gcc", *flags, f"-I{HEADER.parent}", HERE / "abi_test.c", ARCHIVE, "-lresolv", "-o", path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_case(program: Path, case: str) -> None:
    run(program, case)


@pytest.mark.parametrize(
    "compiler", [("gcc", "-std=c99", "-x", "c"), ("g++", "-std=c++17", "-x", "c++")]
)
def test_header_compiles_alone(compiler: tuple[str, ...]) -> None:
    run(*compiler, "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", HEADER)


def test_every_function_is_there() -> None:
    prototypes = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\b(fs_\w+)\(", prototypes))
    defined = set(re.findall(r" T (fs_\w+)$", run("nm", "--defined-only", ARCHIVE), re.MULTILINE))
    assert declared == defined
