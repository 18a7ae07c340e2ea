"""Programs in processes of their own, without the seconds that importing torch takes. One process
does the imports, then forks for each program. fserver loads its engine at the first call, so the
fork has none of its threads."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fserver.bench import processes
from fserver.bench.processes import Child

MARGIN = 30.0  # seconds after those of the program


class Forks:
    """A process with the imports done, started with these variables in its environment."""

    def __init__(self, **env: str) -> None:
        self._child = Child("process that forks", _fork, **env)

    def run(
        self, *command: str, limit: int, finalize: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, with its arguments, as ``python PROGRAM ...`` or ``python -c CODE ...``
        would, with these variables in its environment. SIGALRM ends it after ``limit`` seconds.
        The process ends without finalizing the interpreter, which takes half a second, unless
        ``finalize`` is true."""
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            files = (os.devnull, out.name, err.name)
            self._child.put((command, limit, finalize, env, files))
            status = self._child.get(limit + MARGIN)
            return subprocess.CompletedProcess(command, status, out.read(), err.read())

    def close(self) -> None:
        self._child.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[Forks]:
    """Runs programs that need no interpreter without torch."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[forkserver.ForkServer]:
    """A fork server of multiprocessing for this test alone, with its standard error. The test may
    end it; the one that all tests share has children that live until the session ends."""
    made = forkserver.ForkServer()
    monkeypatch.setattr(processes, "PRELOAD", processes.PRELOAD[:1])
    monkeypatch.setattr(forkserver, "_forkserver", made)
    for name in ("connect_to_new_process", "ensure_running", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(made, name))
    yield made
    made._stop()


def _fork(conn: Connection) -> None:
    """Forks for each program that comes, and answers how it ended."""
    import nodes  # noqa: F401
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # a child's exit then leaves most of this memory alone
    while True:
        command, limit, finalize, env, files = conn.recv()
        if child := os.fork():
            conn.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        signal.alarm(limit)
        os.environ.update(env)
        for fd, path in enumerate(files):
            os.dup2(os.open(path, os.O_RDWR), fd)
        status = _run(command)
        sys.stdout.flush()
        sys.stderr.flush()
        if finalize:
            ctypes.pythonapi.Py_Exit(status)
        os._exit(status)


def _run(command: tuple[str, ...]) -> int:
    """Runs a program as ``__main__``, whose variables live on; gives its exit status."""
    program, code = command[0], None
    if program == "-c":
        program, code, sys.argv = "<string>", command[1], ["-c", *command[2:]]
    else:
        code, sys.argv = Path(program).read_text(), list(command)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = program
    try:
        exec(compile(code, program, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
