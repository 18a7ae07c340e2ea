"""`fserver config`, and what it says: programs are compiled and linked in each way."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fserver import config

ROOT = Path(__file__).resolve().parents[2]
LIB = config.HOME / "lib"
HEADER = (ROOT / "engine/cabi/fserver.h").read_text()
SONAME = "libfserver.so." + re.findall(r"^#define FS_ABI (\d+)$", HEADER, re.MULTILINE)[0]

MAIN = """
#include <cstdio>
#include "fserver/fserver.hpp"
int main() {
  try {
    fserver::Options o;
    o.transport = "pigeon";
    fserver::Worker worker(o);
  } catch (const fserver::ConfigError &e) {
    std::puts(e.what());
  }
}
"""


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words(*options: str) -> list[str]:
    return shlex.split(run(sys.executable, "-m", "fserver", "config", *options))


@pytest.fixture
def main(tmp_path: Path) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path / "main.cc"
    path.write_text(MAIN)
    return path


def needed(program: Path) -> list[str]:
    return re.findall(r"NEEDED\).*\[(.+)\]", run("readelf", "-dW", program))


def test_shared_and_archive(main: Path) -> None:
    out = main.with_suffix("")
    for more, linked in (([], True), (["--archive"], False)):
        flags = words("--cflags", "--libs", *more)
        run("g++", "-std=c++17", main, *flags, "-o", out)
        assert [n for n in needed(out) if "fserver" in n] == [SONAME] * linked
        assert "pigeon" in run(out)


def test_pkg_config(main: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    (folder,) = words("--pkgconfig")
    for name in ("fserver", "fserver-archive"):
        said = run("pkg-config", "--cflags", "--libs", name, PKG_CONFIG_PATH=folder)
        out = main.with_suffix("")
        run("g++", "-std=c++17", main, *shlex.split(said), "-o", out)
        assert "pigeon" in run(out)


def test_what_the_library_shows() -> None:
    """Its own functions, at their version, and nothing of Go or of the GPU driver's library."""
    (library,) = LIB.glob("libfserver.so.*")
    symbols = run("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines()
    names = {line.split()[-1] for line in symbols}
    abi = library.suffix[1:]
    assert names - {f"FSERVER_{abi}"} and all(
        re.fullmatch(rf"fs_\w+@@FSERVER_{abi}", name) for name in names - {f"FSERVER_{abi}"}
    )
    section = run("readelf", "-dW", library)
    assert f"[libfserver.so.{abi}]" in section and "NODELETE" in section
    assert not re.search(r"TEXTREL|RPATH|RUNPATH", section)
    assert "nvml" not in run("nm", "-D", "--undefined-only", library)
    stub = run("nm", "-D", "--defined-only", "--with-symbol-versions", LIB / "libfserver.so")
    assert {line.split()[-1] for line in stub.splitlines()} == names


def test_immediate_binding() -> None:
    (library,) = LIB.glob("libfserver.so.*")
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).fs_abi())"
    assert run(sys.executable, "-c", code, LD_BIND_NOW="1").strip() == library.suffix[1:]


def test_the_headers_are_those_of_this_tree() -> None:
    for path in (ROOT / "include").rglob("*.h*"):
        copy = config.HOME / "include" / path.relative_to(ROOT / "include")
        assert copy.read_text() == path.read_text(), "make ext"


def test_the_page_has_the_example() -> None:
    assert (ROOT / "examples/cpp/echo.cc").read_text() in (ROOT / "docs/cpp.md").read_text()


@pytest.mark.parametrize("name", ["plain", "ü~+@", "two words", "it's"])
def test_what_a_shell_reads(monkeypatch, tmp_path: Path, capsys, name: str) -> None:
    home = tmp_path / name
    (home / "lib").mkdir(parents=True)
    (home / "lib/libfserver.so").touch()
    monkeypatch.setattr(config, "HOME", home)
    config.main(["--cmake"])
    assert capsys.readouterr().out == f"{home}/lib/cmake/fserver\n"
    config.main(["--cflags", "--libs"])
    said = capsys.readouterr().out
    flags = [f"-I{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib"]
    assert shlex.split(said) == [*flags, "-lfserver", "-pthread"]
    assert (said.split() == shlex.split(said)) == (name in ("plain", "ü~+@"))


def test_wrong_use() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fserver", "config"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "nothing is asked for: want --cflags" in done.stderr


def test_without_libraries(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(config, "HOME", tmp_path)
    assert config.main(["--libs"]) == 1
    assert f"{tmp_path / 'lib'} has no libraries" in capsys.readouterr().err
