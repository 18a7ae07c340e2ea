"""Starts Python processes for benchmarks and tests, exchanges objects with them, and ends them.
What a process sends is an answer. If that is a BenchError, the parent raises it."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from .errors import BenchError, WrongDataError

DUMP_S = 0.5  # for a process to print its stacks before the next one does
PRELOAD = [f"{__package__}.actors"]  # modules that take long to import: the fork server has them
KILL_TIMEOUT = 20.0  # seconds; what the kernel takes to end a process, with all its memory
GONE = re.compile("EOFError|Pipe|does not answer|by peer")  # another process has failed


class Child:
    """A process that runs function(connection, *args): the fork of one that has imported torch, or
    a new one, if its environment needs variables from the start. Its parent has this object."""

    def __init__(self, name: str, function: Callable[..., None], *args: Any, **variables: str):
        context: Any = multiprocessing.get_context("spawn" if variables else "forkserver")
        context.set_forkserver_preload([*PRELOAD, f"{__package__}.frozen"])
        self.name, (self.conn, theirs) = name, context.Pipe()
        self.process = context.Process(None, _main, name, (theirs, function, args), daemon=True)
        try:
            with mock.patch.dict(os.environ, variables):
                self.process.start()
        except (EOFError, OSError) as error:  # EOFError: the fork server has ended
            text = "check for a killed process, free memory, and the limit of processes, ulimit -u"
            raise BenchError(f"the {name} cannot be started: {error!r} ({text})") from None
        theirs.close()

    def put(self, value: Any) -> None:
        """Sends a value. If the process has ended, `get` says so."""
        with contextlib.suppress(OSError):
            self.conn.send(value)

    def get(self, limit: float) -> Any:
        """Returns the next answer. Raises BenchError as gather does."""
        return gather([self], limit, 0)[0]

    def close(self, patience: float = 0) -> None:
        """Gives the process time to end by itself, then kills it, and closes the connection. One
        that is still there is left behind, and this process ends without waiting for it."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(KILL_TIMEOUT)
        if self.process.is_alive():
            name = f"the {self.name} (pid {self.process.pid})"
            text = f"{name} has not ended {KILL_TIMEOUT:g} s after SIGKILL: the kernel holds it"
            print(f"bench: {text} (/proc/{self.process.pid}/stack shows where)", file=sys.stderr)
            atexit.register(os._exit, 1)
            atexit.register(sys.stdout.flush)  # runs before it
        self.conn.close()


def gather(children: Sequence[Child], limit: float, parting: float) -> list[Any]:
    """Returns the next answer of each. Raises BenchError if one failed, ended, or did not answer in
    `limit` seconds, once it has printed its stacks. The others get `parting` seconds to answer: the
    first may only have lost a peer. Wrong data is reported first, the loss of a peer last."""
    waiting, found = {child.conn: child for child in children}, dict[Connection, Any]()
    errors: list[BenchError] = []
    end = time.monotonic() + limit
    while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
        for conn in [conn for conn in waiting if conn in ready]:
            child = waiting.pop(conn)
            try:
                found[conn] = conn.recv()
            except (EOFError, ConnectionResetError):
                child.process.join(5)
                status = child.process.exitcode
                found[conn] = BenchError(f"the {child.name} ended with status {status}")
            if isinstance(found[conn], BenchError):
                errors.append(found[conn])
                end = min(end, time.monotonic() + parting)
    if waiting and not errors:
        for child in waiting.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)
        names = " and ".join(child.name for child in waiting.values())
        errors = [BenchError(f"no answer from {names} within {limit:g} s")]
    if errors:
        errors.sort(key=lambda e: (not isinstance(e, WrongDataError), bool(GONE.search(e.reason))))
        raise type(errors[0])("\n".join(map(str, errors)), errors[0].reason)
    return [found[child.conn] for child in children]


def failure(error: BaseException) -> BenchError:
    """Makes the answer of this process from an exception that is being handled."""
    name = multiprocessing.current_process().name
    if isinstance(error, WrongDataError):
        return WrongDataError(f"the {name} received wrong data: {error}")
    if isinstance(error, (BenchError, ModuleNotFoundError)):
        return BenchError(f"the {name} failed: {error}", str(error))
    text = f"the {name} failed: \n{traceback.format_exc()}"
    return BenchError(text, f"{type(error).__name__}: {error}")


def _main(conn: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        function(conn, *args)
    except Exception as error:
        with contextlib.suppress(OSError):
            conn.send(failure(error))
        sys.exit(1)
