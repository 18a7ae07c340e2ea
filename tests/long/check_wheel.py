"""A wheel for this Python and processor, tried in empty environments with the oldest and the newest
torch. `tools/check_long.sh wheel` runs this.

FSERVER_WHEEL=FILE tries a wheel that is there. WHEEL_TORCHES="2.11.0 2.15.0" names the versions.
WHEEL_ENVIRONMENTS=DIR keeps the environments, which hold 6 GB each, and uses them again.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KNOWN = re.findall(r"^torch==(\S+)$", (ROOT / "requirements/torches.txt").read_text(), re.MULTILINE)
TORCHES = os.environ.get("WHEEL_TORCHES", f"{KNOWN[0]} {KNOWN[-1]}").split()
HEADER = (ROOT / "engine/cabi/fserver.h").read_text()
ABI = re.findall(r"^#define FS_ABI (\d+)$", HEADER, re.MULTILINE)[0]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

# The newest that a host of manylinux_2_28 has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}
LIBRARIES = {"libc", "libm", "libpthread", "libdl", "librt", "libresolv", "libgcc_s"}
LOADERS = {"ld-linux-x86-64", "ld-linux-aarch64"}
TORCH = {"libtorch_python", "libtorch_cpu", "libc10"}

PAIR = """
    import os
    import torch
    import fserver

    if os.environ["DMLC_ROLE"] == "server":
        with fserver.Server.from_env() as server:
            try:
                while True:
                    for handler, (x,), keys in server.get_batch():
                        server.respond([x @ x.T], handler)
            except fserver.ClosedError:
                pass
    elif os.environ["DMLC_ROLE"] == "worker":
        with fserver.Worker.from_env() as worker:
            x, y = torch.randn(128, 512), torch.empty(128, 128)
            worker.wait(worker.push_pull([x], [0], [y], [0]), timeout_ms=10000)
            assert torch.allclose(y, x @ x.T)
            print("right with torch", torch.__version__)
    """


def run(*command: str | Path, status: int = 0, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel() -> Path:
    given = os.environ.get("FSERVER_WHEEL")
    if given:
        return Path(given).resolve()
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for old in (ROOT / "dist").glob(f"*-{tag}-*{platform.machine()}.whl"):
        old.unlink()
    options = ["--python", sys.executable, "--machine", platform.machine()]
    run(ROOT / "tools/wheels.sh", *options)
    (path,) = (ROOT / "dist").glob(f"*-{tag}-*{platform.machine()}.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_name_and_contents(wheel: Path, unpacked: Path) -> None:
    assert re.search(r"-manylinux_2_28_(x86_64|aarch64)\.whl$", wheel.name)
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    libraries = {"fserver/lib/libfserver.so", f"fserver/lib/libfserver.so.{ABI}"}
    assert libraries | {"fserver/lib/libfserver.a", "fserver/include/ps/ps.h"} <= files
    objects = sorted(name for name in files - libraries if ".so" in name)
    suffix = re.findall(r"fserver/_C(.*)", objects[0])[0]
    adapters = ["_".join(version.split(".")[:2]) for version in KNOWN]
    assert objects == [f"fserver/_C{suffix}", *(f"fserver/_torch/{a}{suffix}" for a in adapters)]
    (info,) = unpacked.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert (info / "licenses/NOTICES").read_text() == (ROOT / "NOTICES").read_text()
    assert re.findall("^Requires-Dist: torch(.*)$", metadata, re.MULTILINE) == [">=2.11"]
    assert not re.search("^License(-Expression)?: ", metadata, re.MULTILINE)


def test_symbols(unpacked: Path) -> None:
    for path in unpacked.rglob("*.so*"):
        if path.name == "libfserver.so":
            continue  # for the linker alone
        section = run("readelf", "-dW", path)
        assert not re.search("RPATH|RUNPATH|TEXTREL", section), path
        needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.+)\]", section)}
        adapter = path.parent.name == "_torch"
        assert adapter or "BIND_NOW" not in section  # an adapter may: all that it needs is there
        more = {*TORCH, "libstdc++"} if adapter else set()
        assert needed <= LIBRARIES | LOADERS | more, path
        assert not adapter or needed >= TORCH
        symbols = run("nm", "-D", "--with-symbol-versions", path)
        versions = set(re.findall(r"@@?(?!FSERVER)([A-Z]+)_([0-9.]+)$", symbols, re.MULTILINE))
        assert {family for family, _ in versions} >= {"GLIBC"}, path
        for family, version in versions:
            assert tuple(map(int, version.split("."))) <= NEWEST[family], (path, family, version)
        defined = re.findall(r"^\S+ [A-Za-z] (\w+)", symbols, re.MULTILINE)
        if path.parent.name == "lib":
            assert all(name.startswith("fs_") for name in defined if name != f"FSERVER_{ABI}")
        else:
            assert defined == ["fserver_adapter" if adapter else "PyInit__C"], path


def test_verbs_is_built_in(unpacked: Path) -> None:
    """libibverbs is opened at run time, so nothing but its functions' names is in the wheel."""
    (extension,) = (unpacked / "fserver").glob("_C*.so")
    built = extension.read_bytes()
    assert b"ibv_reg_mr_iova2" in built
    assert b"not built in: infiniband/verbs.h" not in built


class Environment:
    """An empty environment with the wheel and one torch."""

    def __init__(self, folder: Path, wheel: Path, torch: str) -> None:
        self.folder, self.torch = folder, torch
        self.python = folder / "bin/python"
        pip = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if not self.python.exists():
            run(sys.executable, "-m", "venv", folder)
            run(*pip, f"torch=={torch}", "numpy", "pytest")
        run(*pip, "--force-reinstall", "--no-deps", wheel)
        run(self.python, "-m", "pip", "check")

    def run(self, *command: str | Path, status: int = 0, **env: str) -> str:
        """Output of a command that finds neither a compiler nor Go, unless `env` sets PATH."""
        hidden = ("PYTHONPATH", "FSERVER_ARCHIVE")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}
        clean["XDG_CACHE_HOME"] = str(self.folder / "cache")
        clean["PATH"] = str(self.folder / "bin")
        return run(*command, status=status, cwd=self.folder, env={**clean, **env})


@pytest.fixture(scope="module", params=TORCHES)
def environment(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    kept = os.environ.get("WHEEL_ENVIRONMENTS")
    folder = Path(kept) / request.param if kept else tmp_path_factory.mktemp("env")
    shutil.rmtree(folder / "tests", ignore_errors=True)
    return Environment(folder, wheel, request.param)


def test_installing_did_not_replace_torch(environment: Environment) -> None:
    said = environment.run(environment.folder / "bin/fserver", "--version")
    assert re.search(rf"^torch +{re.escape(environment.torch)}(\+\w+)?$", said, re.MULTILINE)
    assert not (environment.folder / "cache").exists()  # nothing was compiled


def test_worker_and_server(environment: Environment) -> None:
    program = environment.folder / "pair.py"
    program.write_text(textwrap.dedent(PAIR))
    command = [environment.folder / "bin/fserver", "run", "--workers", "1", "--servers", "1"]
    said = environment.run(*command, program)
    assert f"right with torch {environment.torch}" in said


def test_the_tests_of_tensors(environment: Environment) -> None:
    """Those that need nothing of the source tree, run against what is installed."""
    tests = environment.folder / "tests"
    tests.mkdir()
    modules = ["test_push_pull", "test_objects", "test_refusals", "test_lifetime"]
    for path in (ROOT / "tests/python").glob("*.py"):
        if path.stem in modules or not path.stem.startswith("test_"):
            shutil.copy(path, tests)
    said = environment.run(environment.python, "-m", "pytest", "-q", tests)
    assert re.search(r"\d\d+ passed", said)


def test_a_torch_that_the_wheel_does_not_know(environment: Environment) -> None:
    """As if the wheel had no adapter for it: it is compiled, or a line says what is missing."""
    minor = ".".join(environment.torch.split(".")[:2])
    name = f"{minor.replace('.', '_')}{SUFFIX}"
    (adapter,) = environment.folder.glob(f"lib/python*/site-packages/fserver/_torch/{name}")
    hidden = adapter.rename(environment.folder / name)
    try:
        load = "from fserver import _loader; print(_loader.load().live())"
        said = environment.run(environment.python, "-c", load, status=1)
        others = ", ".join(v for v in (v.rpartition(".")[0] for v in KNOWN) if v != minor)
        has = f"adapters for torch {others}, but torch {environment.torch}"
        assert re.search(re.escape(has) + r"(\+\w+)? is installed", said)
        assert "apt-get install g++" in said.splitlines()[-1]
        assert "CompileError" not in said  # one error, not a chain of them
        said = environment.run(environment.python, "-c", load, PATH=os.environ["PATH"])
        assert "(0, 0, " in said and "compiling an adapter" in said
    finally:
        hidden.rename(adapter)
        shutil.rmtree(environment.folder / "cache", ignore_errors=True)
