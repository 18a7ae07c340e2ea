"""Programs in processes of their own, without the seconds that importing torch takes. One process
does the imports, then forks for each program. fserver loads its engine at the first call, so the
fork has none of its threads."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class Forks:
    """A process with the imports done, under the environment given."""

    def __init__(self, **env: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, limit: int, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a program, with its arguments, as ``python PROGRAM ...`` or ``python -c CODE ...``
        would, with these variables in its environment. SIGALRM ends it after ``limit`` seconds."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            print(
                json.dumps([command, limit, env, out.name, err.name]),
                file=self._server.stdin,
                flush=True,
            )
            status = self._server.stdout.readline()
            assert status, "the process that forks has ended"
            return subprocess.CompletedProcess(command, int(status), out.read(), err.read())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@pytest.fixture(scope="session")
def programs() -> Iterator[Forks]:
    """Runs programs that need no interpreter without torch."""
    made = Forks()
    yield made
    made.close()


def forked() -> tuple[str, bytes]:
    """Forks for each line of stdin. In a child it returns the path of the program and its text,
    with everything ready to run it."""
    for line in sys.stdin:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        command, limit, env, *outputs = json.loads(line)
        os.environ.update(env)
        signal.alarm(limit)
        for fd, path in enumerate([os.devnull, *outputs]):
            os.dup2(os.open(path, os.O_RDWR), fd)
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            return "<string>", command[1].encode()
        sys.argv = command
        return command[0], Path(command[0]).read_bytes()
    sys.exit()


if __name__ == "__main__":
    import nodes  # noqa: F401
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # a child's exit then leaves most of this memory alone

    # As __main__ itself, so that the program's globals live until the interpreter has ended.
    __file__, _program = forked()
    exec(compile(_program, __file__, "exec", dont_inherit=True), globals())
