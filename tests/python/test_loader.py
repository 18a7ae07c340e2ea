"""What the loader does: which adapter it takes, what it compiles, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import Forks

from fserver import _loader
from fserver._torch import build, cache

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(torch.__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSION = f"_C{SUFFIX}"
NEW = "2.99.1+cu999"  # a torch that the package has no adapter for


Run = Callable[..., str]


@pytest.fixture
def run(programs: Forks) -> Run:
    """Gives the output of a process that has imported torch, and has not loaded the extension."""

    def output(code: str) -> str:
        cache_home = os.environ["XDG_CACHE_HOME"]
        done = programs.run("-c", textwrap.dedent(code), limit=120, XDG_CACHE_HOME=cache_home)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return output


def fresh(code: str, **env: str) -> str:
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


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", NEW)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the adapters that a test puts there."""
    folder = tmp_path / "fserver"
    (folder / "_torch").mkdir(parents=True)
    monkeypatch.setattr(_loader, "_PACKAGE", folder)
    return folder


LAZY = """
    #include <Python.h>
    void *absent(void);
    static PyObject *call(PyObject *s, PyObject *a) { return absent(); }
    static PyMethodDef methods[] = {{"call", call, METH_NOARGS, ""}, {0}};
    static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "lazy", "", -1, methods};
    PyMODINIT_FUNC PyInit_lazy(void) { return PyModule_Create(&def); }
    """


def test_lazy_binding_around_the_import_only(tmp_path: Path) -> None:
    (tmp_path / "lazy.c").write_text(LAZY)
    include, module = sysconfig.get_path("include"), tmp_path / "lazy.so"
    flags = ["-shared", "-fPIC", "-Wl,-z,lazy", f"-I{include}"]
    subprocess.run(["gcc", *flags, tmp_path / "lazy.c", "-o", module], check=True)
    code = """
        import sys
        from fserver import _loader
        flags = sys.getdlopenflags()
        try:
            print(_loader._import("lazy").__name__)
        except _loader.LoadError as error:
            print(error)
        assert sys.getdlopenflags() == flags
        """
    assert fresh(code, PYTHONPATH=str(tmp_path)) == "lazy"
    answer = fresh(code, PYTHONPATH=str(tmp_path), LD_BIND_NOW="1")
    assert "undefined symbol: absent" in answer and "unset LD_BIND_NOW" in answer


def test_load_from_many_threads(run: Run) -> None:
    code = """
        import sys, threading
        from fserver import _loader
        assert "fserver._C" not in sys.modules
        start, seen = threading.Barrier(8), set()
        def load():
            start.wait()
            seen.add(_loader.load())
        threads = [threading.Thread(target=load) for _ in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(len(seen))
        """
    assert run(code) == "1"


def test_load_in_a_mode_that_makes_no_plain_tensors(run: Run) -> None:
    code = """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from fserver import _loader
        torch.set_default_device("meta")
        with FakeTensorMode(), torch.inference_mode():
            print(_loader.load().live()[0])
        """
    assert run(code) == "0"


def test_forked_beside_a_load() -> None:
    """A child has none of the threads of its parent, so it does not wait for one that loads."""
    held, over = threading.Event(), threading.Event()

    def load() -> None:
        with _loader._lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=load)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(not _loader._lock.acquire(timeout=10))
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_missing_extension(tmp_path: Path) -> None:
    package = tmp_path / "fserver"
    package.mkdir()
    again = re.escape("pip install --no-deps --force-reinstall` with the wheel of fserver")
    with pytest.raises(ImportError, match=f"has not been built .run `.*{again}"):
        _loader.check(package)
    (tmp_path / "setup.py").touch()
    with pytest.raises(ImportError, match=f"has not been built.*make af. in {tmp_path},"):
        _loader.check(package)
    (package / "_C.cpython-30-x.so").touch()
    with pytest.raises(ImportError, match=r"it has only _C\.cpython-30-x\.so.*pip install"):
        _loader.check(package)
    (package / EXTENSION).touch()
    _loader.check(package)


# Which adapter


def test_a_compiled_adapter_that_does_not_load(run: Run) -> None:
    """As one of another container that has the same home: the package's is taken."""
    code = """
        import torch
        from fserver import _loader
        from fserver._torch import cache
        made = cache.path(torch.__version__)
        made.parent.mkdir(parents=True)
        made.write_text("no library")
        print(hasattr(_loader.load(), "Worker"))
        """
    assert run(code) == "True"


@pytest.mark.parametrize("home", [None, "relative/path"])
def test_no_place_for_compiled_adapters(
    package: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """Nothing is loaded from a folder of the current one."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # of a user who is in no list
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache.path(torch.__version__) is None
    given = package / "_torch" / build.file_name(torch.__version__)
    given.touch()
    assert _loader._adapter() == given
    given.unlink()
    with pytest.raises(_loader.LoadError, match="this user has no home .set XDG_CACHE_HOME"):
        _loader._adapter()


def test_a_cache_that_cannot_be_looked_at(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a home of another user's: it has no adapter."""
    given = package / "_torch" / build.file_name(torch.__version__)
    given.touch()
    monkeypatch.setattr(cache, "path", lambda version: package / ("x" * 300))  # ENAMETOOLONG
    assert _loader._adapter() == given


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.15.0", "2_15"),
        ("2.15.3+cu132", "2_15"),
        ("2.16.0a0+git0123abc", "2_16"),
        ("2.17.0.dev20270101+cpu", "2_17"),
        ("3.0.0", "3_0"),
    ],
)
def test_the_minor_version_names_the_adapter(
    package: Path, monkeypatch: pytest.MonkeyPatch, version: str, name: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for other in ("2_1", "2_14", "2_15", "2_16", "2_17", "3_0"):
        (package / "_torch" / (other + SUFFIX)).touch()
    assert _loader._adapter() == package / "_torch" / (name + SUFFIX)
    made = cache.path(version)  # one for exactly this torch goes before
    made.parent.mkdir(parents=True)
    made.touch()
    assert _loader._adapter() == made


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    text = (
        r"needs torch 2\.11 or later, but torch 2\.9\.1\+cu128 is installed .*pip install 'torch>=2"
    )
    with pytest.raises(_loader.LoadError, match=text):
        _loader._adapter()


def test_no_torch() -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        import fserver
        from fserver import _loader
        try:
            _loader.load()
        except ImportError as error:
            print(error)
        """
    answer = fresh(code)
    assert "fserver needs torch 2.11 or later, but torch is not installed (run `" in answer


# What does not fit


def refused(run: Run, *adapters: Path) -> list[str]:
    """What the loader says of adapters, in a process whose extension has none."""
    code = f"""
        from pathlib import Path
        from fserver import _loader
        module = _loader._import("fserver._C")
        for adapter in {[str(adapter) for adapter in adapters]!r}:
            try:
                _loader._join(module, Path(adapter))
            except _loader.LoadError as error:
                print(error)
        assert not hasattr(module, "Worker")
        """
    return run(code).splitlines()


def test_what_is_no_adapter_and_one_from_other_sources(run: Run, tmp_path: Path) -> None:
    none, other = tmp_path / "none.so", tmp_path / "other.so"
    none.write_bytes(b"no object")
    (tmp_path / "x.cc").write_text(
        '#include "adapter.h"\n'
        "static const fserver::Torch table{FS_ADAPTER + 1};\n"
        'extern "C" const fserver::Torch *fserver_adapter(const fserver::Host *host) {\n'
        "  return host->adapter == FS_ADAPTER ? &table : nullptr;\n"
        "}\n"
    )
    python = Path(sysconfig.get_path("include"))
    flags = [*build.compile_flags(cache.HEADER), *build.includes(HOME, python)]
    command = ["g++", "-shared", *flags, "-fvisibility=default"]
    subprocess.run([*command, tmp_path / "x.cc", "-o", other], check=True)
    first, second = refused(run, none, other)
    for line, path in ((first, none), (second, other)):
        assert f"fserver: the adapter {path} does not fit torch {torch.__version__}: " in line
        assert line.endswith(
            f"(run `{sys.executable} -m fserver._torch` to compile an adapter for this torch)"
        )
    assert "it was built from other sources than fserver._C" in second


FACTS = {
    "the address of the tensor": "facts[0] + 8",
    "the address of the storage": "facts[1] + 8",
    "the address of the data": "facts[2] + 2",
    "the memory of the storage": "facts[3] + 2",
    "the offset in the storage": "facts[5] + 1",
    "the shape": "(4, 3)",
    "the strides": "(1, 4)",
    "the dtype": "'torch.uint16'",
    "the device": "'cuda:0'",
}


def test_every_fact_that_differs_is_named(run: Run) -> None:
    """The adapter is right here, so Python lies."""
    code = f"""
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from fserver import _loader
        module = _loader._import("fserver._C")
        adapter = _loader._adapter()
        positions = (0, 1, 2, 3, 5, 7, 8, 9, 10)
        for position, lie in zip(positions, {list(FACTS.values())!r}):
            def join(path, tensor, facts):
                facts = facts[:position] + (eval(lie),) + facts[position + 1 :]
                module.join(path, tensor, facts)
            try:
                _loader._join(SimpleNamespace(join=join), adapter)
            except _loader.LoadError as error:
                print(error)
        assert not hasattr(module, "Worker")
        _loader._join(module, adapter)
        assert module.live() == (0, 0, module.live()[2])
        """
    lines = run(code).splitlines()
    compiled = torch.__version__.partition("+")[0]
    for line, name in zip(lines, FACTS, strict=True):
        assert f"does not fit torch {torch.__version__}: it was compiled for torch" in line
        assert f"for torch {compiled} and reads {name} of a tensor wrongly (run" in line


# Compiling


@pytest.fixture
def real(package: Path) -> Iterator[Path]:
    """The package with no adapter, for which one could be compiled."""
    (package / "_torch" / f"2_11{SUFFIX}").touch()
    (package / "_torch" / f"2_8{SUFFIX}").touch()
    yield package


HAS = r"fserver has adapters for torch 2\.8, 2\.11, but torch 2\.99\.1\+cu999 is installed: "


def test_without_a_compiler(real: Path, new_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-cxx -m64")
    text = HAS + r".*there is no C\+\+ compiler no-cxx .run apt-get install g\+\+, or set CXX"
    with pytest.raises(_loader.LoadError, match=text) as caught:
        _loader._adapter()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "remedy"), [("Python.h", "python3-dev"), ("TensorImpl.h", "with its headers")]
)
def test_without_headers(
    real: Path, new_torch: None, monkeypatch, tmp_path: Path, name: str, remedy: str
) -> None:
    if name == "Python.h":
        fake = SimpleNamespace(get_path=lambda _: str(tmp_path), get_config_var=lambda _: SUFFIX)
        monkeypatch.setattr(cache, "sysconfig", fake)
    else:
        monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(_loader.LoadError, match=rf"{HAS}.*{name} is missing \(.*{remedy}"):
        _loader._adapter()


def test_a_cache_that_cannot_be_written(real: Path, new_torch: None, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(_loader.LoadError, match=HAS + ".*/proc/none.*set XDG_CACHE_HOME"):
        _loader._adapter()


def test_sources_that_do_not_compile(real: Path, new_torch: None, monkeypatch, tmp_path) -> None:
    (tmp_path / "broken.cc").write_text("#error this torch has no tensors\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "broken.cc")
    with pytest.raises(
        _loader.LoadError, match=HAS + "the adapter does not compile: .*no tensors"
    ) as caught:
        _loader._adapter()
    log = re.search(r"\(see (.*)\)$", str(caught.value))
    assert log and "no tensors" in Path(log[1]).read_text()


def moved(folder: Path) -> Path:
    """Headers of torch in which a tensor has a field that this torch does not have."""
    name = "c10/core/TensorImpl.h"
    text = (HOME / "include" / name).read_text()
    field = re.search(r"^  Storage storage_;$", text, re.MULTILINE)
    assert field, f"{name} is not what this test knows"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(text[: field.start()] + "  void* odd_ = nullptr;\n" + text[field.start() :])
    return folder


COMPILING = f"""
    import threading, torch
    from fserver import _loader
    torch.__version__ = {NEW!r}
    try:
        print(_loader.load().live()[0])
    except _loader.LoadError as error:
        print(error)
    """


COMPILED = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
sleep 2
cp "{adapter}" "$2"
"""
"""A compiler that has compiled: to read torch's headers takes 13 s of a processor."""


@pytest.mark.long  # a minute of a processor
def test_two_processes_compile_once_and_a_wrong_layout_is_refused(tmp_path: Path) -> None:
    """For the first two, what the build has compiled is compiled again; the third compiles with
    wrong headers."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    headers = moved(tmp_path / "headers")
    adapter = ROOT / "fserver/_torch" / build.file_name(torch.__version__)
    compiled = tmp_path / "compiled"
    compiled.write_text(COMPILED.format(adapter=adapter))
    compiled.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(COMPILING)],
            env={**env, "XDG_CACHE_HOME": str(cache_home), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cache_home, more in (
            (good, {"CXX": str(compiled)}),
            (good, {"CXX": str(compiled)}),
            (bad, {"CXXFLAGS": f"-O0 -I{headers}"}),
        )
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [out for out, _ in outputs[:2]] == ["0\n", "0\n"], outputs
    said = "".join(err for _, err in outputs[:2])
    assert said.count(f"fserver: compiling an adapter for torch {NEW} (only once)\n") == 1, said
    [made] = good.rglob("*.so")
    assert made.name == NEW + SUFFIX and made.parents[1] == good / "fserver"
    assert re.search(
        rf"/{re.escape(NEW)}\S+ does not fit torch {re.escape(NEW)}: it was compiled for torch "
        rf"\S+ and reads the .* wrongly \(run `.* -m fserver\._torch`",
        outputs[2][0],
    ), outputs[2]


def test_the_extension_has_nothing_with_tensors_before_it_is_joined(run: Run) -> None:
    code = """
        from fserver import _loader
        module = _loader._import("fserver._C")
        print(sorted(name for name in dir(module) if not name.startswith("_")))
        """
    names = ["Node", "Scheduler", "abi", "enter", "heap", "host", "join", "live", "probe"]
    assert run(code) == str([*names, "settings"])


# A torch that cannot be used

WHOLE = "__version__ = '2.15.0'\nTensor = utils = library = object()\n"
TORCHES = {
    "no library": (
        WHOLE.replace("library = ", ""),
        r"the installation of torch 2\.15\.0 in .*/torch/__init__\.py is damaged: .*library.* "
        r"\(run `.* -m pip install --force-reinstall 'torch>=2\.11'`\)",
    ),
    "old": (
        "__version__ = '1.13.1'",
        r"fserver needs torch 2\.11 or later, but torch 1\.13\.1 is installed \(run `.* -m pip "
        r"install 'torch>=2\.11'`\)",
    ),
    "not torch": ("", r".*/torch/__init__\.py, .* has no version: it is not PyTorch \(rename it,"),
    "no import": (
        "raise OSError('libcudart.so.99: cannot open\\nshared object file')",
        r"importing torch fails: OSError: libcudart\.so\.99: cannot open shared object file \(run",
    ),
    "no module of it": (
        "import absent_part",
        r"importing torch fails: ModuleNotFoundError: No module named 'absent_part' \(run `",
    ),
}
OPENS = "import fserver; fserver.Worker(connect=False)"
CASES = [(kind, OPENS) for kind in TORCHES]
CASES += [
    (kind, f"import {names}")
    for kind in ("no library", "old", "not torch")
    for names in ("torch, fserver", "fserver, torch")
]


@pytest.mark.parametrize(("kind", "code"), CASES)
def test_a_torch_that_cannot_be_used(tmp_path: Path, kind: str, code: str) -> None:
    source, text = TORCHES[kind]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.splitlines()[-1]
    assert re.match("fserver._loader.LoadError: ", last) and re.search(text, last), done.stderr


@pytest.mark.parametrize("kind", TORCHES)
def test_no_adapter_is_compiled_for_it(tmp_path: Path, kind: str) -> None:
    source, text = TORCHES[kind]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "fserver._torch"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and re.search(text, line)


def test_what_needs_no_torch(tmp_path: Path) -> None:
    """Beside a torch that cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCHES["no import"][0])
    code = """
        import fserver
        from fserver.env import settings

        assert settings({"DMLC_ROLE": "worker"})["missing"]
        with fserver.Scheduler(scheduler="127.0.0.1:0", connect=False) as scheduler:
            print(scheduler.scheduler)
            try:
                fserver.Worker(connect=False)
            except ImportError as error:
                print(error)
            scheduler.close()
    """
    address, error = fresh(code, PYTHONPATH=str(tmp_path)).splitlines()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert re.search(TORCHES["no import"][1], error)


def test_a_scheduler_before_torch() -> None:
    """The engine runs when torch is imported. At exit, nodes from before and after are open."""
    code = """
        import sys, threading
        import fserver

        scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False)
        threading.Thread(target=scheduler.connect, daemon=True).start()
        assert "torch" not in sys.modules
        import torch

        where = dict(scheduler=scheduler.scheduler, host="127.0.0.1", connect=False)
        worker, server = fserver.Worker(**where), fserver.Server(**where)
        joins = threading.Thread(target=worker.connect)
        joins.start()
        server.connect()
        joins.join()
        y = torch.zeros(2)
        handle = worker.push_pull([torch.ones(2)], [1], [y], [2])
        ((handler, [x], _),) = server.get_batch()
        server.respond([x + 1], handler)
        worker.wait(handle)
        print(y.tolist(), flush=True)
    """
    assert fresh(code) == "[2.0, 2.0]"


def test_help_compiles_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fserver._torch", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "compiles the adapter" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_command_without_an_engine(tmp_path: Path, damaged: bool) -> None:
    ignored = shutil.ignore_patterns("_C*.so", "lib", "include", "__pycache__")
    shutil.copytree(ROOT / "fserver", tmp_path / "fserver", ignore=ignored)
    if damaged:
        (tmp_path / "fserver" / EXTENSION).write_bytes(b"garbage" * 1000)
    why = "invalid ELF header" if damaged else "it has not been built"

    def fails(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "fserver", *words],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done

    for words in (["env"], ["scheduler"]):
        (line,) = fails(*words).stderr.splitlines()
        assert why in line and "pip install" in line
    report = fails("doctor").stdout
    assert re.search(r"^  no +engine ", report, re.MULTILINE) and why in " ".join(report.split())
