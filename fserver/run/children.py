"""A process that the launcher has started: its output, and how it ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from . import tracebacks
from .output import Screen
from .roles import Process, inherited


class Child:
    """A started process. It is not reaped before the end, so that nobody else gets its number."""

    def __init__(self, process: Process, screen: Screen, number: int) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py"))]
        self.process = process
        self.told = False  # to end, by the launcher: its status is no failure
        self.status: int | None = None  # as a shell shows it, once it has ended
        self.raised: tracebacks.Raised | None = None  # what ended it, as far as it is known
        self._popen = subprocess.Popen(
            [*command, str(os.getpid()), *process.command],
            env={**inherited(os.environ), **process.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._popen.stdout and self._popen.stderr
        self.outputs = {1: self._popen.stdout, 2: self._popen.stderr}
        self.error = screen.stream(2, process.name, number, holds=True)
        self.streams = {1: screen.stream(1, process.name, number), 2: self.error}

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def last(self) -> str:
        """The last line of its standard error, except log lines of the engine."""
        return self.error.last

    def look(self) -> bool:
        """Whether it has ended since the last look."""
        if self.status is not None:
            return False
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return False
        self.status = end.si_status + (0 if end.si_code == os.CLD_EXITED else 128)
        return True

    def signal(self, number: int) -> None:
        """To it and to what it has started; what is left of that when it has ended, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may be root's by now
            os.killpg(self.pid, number)

    def reap(self) -> None:
        self._popen.wait()
