"""The names at the edge: what `from fserver import *` gives, what a repr says, what mypy makes of a
user's program, the modes of channels, and that all of it is documented."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, in_thread, together

import fserver
from fserver import fserver_lib
from fserver.channel.describe import MODES, OLD_MODES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MakeCluster = Callable[..., Cluster]


# from fserver import *

COMMON = (  # what a user's module is likely to call its own
    "Error Future abstractmethod asyncio barrier fail field init json links logging np os pathlib "
    "queue re run start stop sys tensor threading time torch wait"
).split()


@pytest.mark.parametrize("name", ["fserver", "fserver.channel", "fserver.ringx"])
def test_a_star_shadows_nothing(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"from {name} import *", space)
    given = set(space) - {"__builtins__"}
    assert given == set(importlib.import_module(name).__all__)
    assert not given & set(dir(builtins)) and not given & set(COMMON)
    assert not {g for g in given if g.startswith("_")}


def test_what_the_star_leaves_out_is_there() -> None:
    """And is the same everywhere."""
    for name in fserver_lib.__all__:
        assert getattr(fserver, name) is getattr(fserver_lib, name)
    assert issubclass(fserver.TimeoutError, TimeoutError)
    assert {"Worker", "Server", "Scheduler", "Handle", "PeerLostError"} <= set(fserver.__all__)


# repr: one line each


def test_repr_of_nodes_and_links(cluster: MakeCluster) -> None:
    two = cluster(workers=1, servers=2)
    first, second = two.worker.links()
    by = f"by {first.transport}"
    assert repr(two.worker) == f"<fserver.Worker 0: connected to server 0 {by}, 1 {by}>"
    assert repr(two.servers[1]) == f"<fserver.Server 1: connected to worker 0 {by}>"
    assert re.fullmatch(r"<fserver.Scheduler 0: open at 127.0.0.1:\d+>", repr(two.scheduler))
    said = repr(second._replace(transport="tcp", reason="cma: off", remote="10.0.0.1:7000"))
    assert said == "<fserver.Link to server 1 at 10.0.0.1:7000 by tcp (cma: off)>"
    two.servers[1].close()
    with pytest.raises(fserver.PeerLostError):
        two.worker.push_pull([torch.zeros(1)], [0], [], []).wait(LIMIT * 1e3)
    said = f"connected to server 0 {by}; not connected to 1 of 2 servers"
    assert repr(two.worker) == f"<fserver.Worker 0: {said}>"
    two.worker.close()
    assert repr(two.worker) == "<fserver.Worker 0: closed>"


def test_repr_of_a_node_with_many_peers(cluster: MakeCluster) -> None:
    worker = cluster(servers=6).worker
    by = f"6 by {worker.links()[0].transport}"
    assert repr(worker) == f"<fserver.Worker 0: connected to 6 servers, {by}>"


def test_repr_of_a_node_that_is_alone() -> None:
    alone = fserver.Worker(scheduler="127.0.0.1:9", backend="CPU", connect=False)
    assert repr(alone) == "<fserver.Worker 0: not connected yet>"
    alone.close()
    server = fserver.Server(scheduler="127.0.0.1:9", backend="CPU", connect=False)
    assert re.fullmatch(r"<fserver.Server 0: not connected yet, at 127.0.0.1:\d+>", repr(server))
    server.close()


def test_repr_of_handles(pair: Cluster) -> None:
    handle = pair.worker.push_pull([torch.zeros(1)], [0], [], [])
    assert repr(handle) == "<fserver.Handle 0 of worker 0: under way>"
    [(handler, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    pair.server.respond([], handler)
    handle.wait(LIMIT * 1e3)
    assert repr(handle) == "<fserver.Handle 0 of worker 0: completed>"
    pair.worker.close()
    assert repr(handle) == "<fserver.Handle 0 of worker 0: closed>"


# Modes of channels


def channels(pair: Cluster, worker: str, server: str) -> list[Any]:
    x, y = torch.ones(2), torch.zeros(2)
    return together(
        [
            lambda: pair.worker.channel([x], [0], [y], [0], mode=worker, name="a"),
            lambda: pair.server.channel([0], [torch.full((2,), 3.0)], [0], mode=server, name="a"),
        ]
    )


@pytest.mark.parametrize(("old", "new"), OLD_MODES.items())
def test_the_old_modes_work(pair: Cluster, old: str, new: str) -> None:
    """Also towards a side that says the new one."""
    w, s = channels(pair, old, new)
    for channel, who in ((w, "worker 0 with 1 server"), (s, "server 0 with 1 worker")):
        assert (channel.mode, channel.path) == (new, "host")
        way = new if new == "host" else f"{new} (by way of host)"
        assert repr(channel) == f"<fserver.Channel 'a' of {who}: {way}, open>"
    serving = in_thread(lambda: (s.recv(), s.send()))
    w.send()
    w.recv()
    serving.result(LIMIT)
    assert w.incoming[0].tolist() == [3, 3]
    w.close()
    assert repr(w).endswith(", closed>")


def test_a_mode_that_is_none(pair: Cluster) -> None:
    for bad in ("gpu", 3, ["kernel"]):
        with pytest.raises(fserver.ConfigError, match="want one of kernel, copy, host$"):
            pair.worker.channel([torch.ones(1)], [0], [], [], mode=bad)  # type: ignore[arg-type]


def test_old_names_are_of_all_modes() -> None:
    assert set(OLD_MODES.values()) == set(MODES)


# Types

TORCH = """
class dtype: ...
class device: ...
class Tensor:
    shape: tuple[int, ...]
    def __add__(self, other: object) -> Tensor: ...
    def __mul__(self, other: object) -> Tensor: ...
    def clone(self) -> Tensor: ...
float32: dtype
"""


def test_a_users_program_under_mypy_strict(tmp_path: Path) -> None:
    """With the package as it is installed, and of torch what the program needs: to read all of
    torch takes 15 s."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    site = sysconfig.get_path("purelib", "venv", {"base": str(environment)})
    shutil.copytree(ROOT, tmp_path / "tree", ignore=_only_sources)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", site]
    subprocess.run(command, cwd=tmp_path / "tree", check=True, timeout=120)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "torch.pyi").write_text(TORCH)
    program = shutil.copy(HERE / "typed_program.py", tmp_path / "program.py")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    found = subprocess.run(
        [*mypy, "--cache-dir", str(tmp_path / "cache"), str(program)],
        cwd=tmp_path,
        env={"MYPYPATH": str(stubs), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.startswith("Success: no issues found"), found.stdout + found.stderr


def _only_sources(folder: str, names: list[str]) -> list[str]:
    """What the package is made of, without what was built."""
    top = Path(folder) == ROOT
    kept = ("fserver", "fserver_lib.py", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in")
    kept = (*kept, "requirements", "tools", "examples", "CHANGELOG.md", "cshim", "csrc", "engine")
    kept = (*kept, "go.mod", "go.sum")
    return [n for n in names if n in (".git", "__pycache__") or top and n not in kept]


# Docstrings


def public() -> Iterator[tuple[str, Any]]:
    """All public names that users may call, with their methods and properties."""
    modules = ["fserver", "fserver.channel", "fserver.errors", "fserver.memory", "fserver.ringx"]
    modules += ["fserver.fserver_lib", "fserver.node", "fserver.handle", "fserver.notify"]
    for module in map(importlib.import_module, modules):
        yield module.__name__, module
        for name in getattr(module, "__all__", None) or vars(module):
            thing = getattr(module, name)
            own = getattr(thing, "__module__", "").startswith("fserver")
            if name.startswith("_") or not own or not callable(thing):
                continue
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for method, value in vars(thing).items():
                    if not method.startswith("_") and (callable(value) or _wraps(value)):
                        yield f"{module.__name__}.{name}.{method}", value


def _wraps(value: Any) -> bool:
    return isinstance(value, property | classmethod | staticmethod)


def test_every_public_name_has_a_docstring() -> None:
    seen = dict(public())
    some = {"fserver.Worker.push_pull", "fserver.Handle.done", "fserver.node.Node.rank"}
    assert some <= set(seen)
    lacking = sorted(name for name, thing in seen.items() if not inspect.getdoc(thing))
    assert lacking == []


def test_the_functions_of_stepmesh_are_documented() -> None:
    """In full: "see there" helps nobody."""
    for name in fserver_lib.__all__:
        thing = getattr(fserver_lib, name)
        text = inspect.getdoc(thing) or ""
        assert "Example:\n" in text and "```python" in text, f"{name}: no example"
        if not inspect.isclass(thing):
            given = list(inspect.signature(thing).parameters)
            assert not given or "Args:\n" in text, f"{name}: no Args"
            for parameter in given:
                assert re.search(rf"^    {parameter}\b.*:", text, re.M), f"{name}: {parameter}"
        assert not re.search(r"\b(See|As|as) :?\w*:?`*(Worker|Server|Node)\.", text), name


def test_the_fields_of_a_link_are_documented() -> None:
    text = inspect.getdoc(fserver.Link) or ""
    for field in fserver.Link._fields:
        assert re.search(rf"^    {field}: \w", text, re.M), field


def test_the_examples_are_python() -> None:
    """All of them can be compiled, and only call what there is."""
    count = 0
    for name, thing in public():
        text = inspect.getdoc(thing) or ""
        for code in re.findall(r"```python\n(.*?)```", text, re.S):
            count += 1
            source = textwrap.dedent(code)
            compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            for called in re.findall(r"\b(?:f|fserver)\.(\w+)\(", source):
                assert hasattr(fserver, called), f"{name}: {called}"
    assert count >= len(fserver_lib.__all__)
