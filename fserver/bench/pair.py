"""Two pinned processes, a worker and a server, that do what the parent tells them.

The parent measures nothing itself: while the two are busy it is blocked.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

START_TIMEOUT = 180.0  # seconds; two imports of torch on a busy machine

Factory = Callable[[str, str], Any]
"""Makes a node from the scheduler's address and the transport: a context manager."""


class BenchError(RuntimeError):
    """The benchmark cannot run, or what it moved was wrong."""


def real_worker(scheduler: str, transport: str) -> Any:
    """The worker of fserver itself."""
    import fserver

    return fserver.Worker(scheduler=scheduler, servers=1, transport=transport)


def real_server(scheduler: str, transport: str) -> Any:
    """The server of fserver itself, with the scheduler in it."""
    import fserver

    return fserver.Server(scheduler=scheduler, workers=1, transport=transport, host_scheduler=True)


@dataclass(frozen=True)
class Nodes:
    """Who plays: fserver, or what a test puts in its place. Picklable."""

    worker: Factory = real_worker
    server: Factory = real_server


@dataclass(frozen=True)
class Case:
    """What one push_pull moves: `out` bytes there, `back` bytes home (0: a lone push)."""

    op: str
    key: int
    out: int
    back: int


class Peer:
    """One of the two processes, seen from the parent."""

    def __init__(self, name: str, factory: Factory, address: str, transport: str, core: int | None):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=_child, args=(theirs, name, factory, address, transport, core), daemon=True
        )
        self._process.start()
        theirs.close()

    def fileno(self) -> int:
        """Readable when `result` does not block."""
        return self._conn.fileno()

    def tell(self, method: str, *args: Any) -> None:
        """Starts a method of the peer; `result` waits for it."""
        self._conn.send((method, args))

    def result(self) -> Any:
        """What the method returned; waits for it."""
        try:
            ok, value = self._conn.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            status = self._process.exitcode
            raise BenchError(f"the {self.name} ended with status {status}") from None
        if not ok:
            raise BenchError(f"the {self.name} failed:\n{value}")
        return value

    def end(self, timeout: float) -> None:
        """Waits for the process to end by itself, then ends it."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._conn.close()


class Pair:
    """A worker and a server, connected."""

    def __init__(self, worker: Peer, server: Peer):
        self._peers = worker, server

    def both(self, method: str, *args: Any, timeout: float) -> tuple[Any, Any]:
        """Runs the method of that name in both; gives the worker's and the server's result."""
        for peer in self._peers:
            peer.tell(method, *args)
        return self.results(timeout)

    def results(self, timeout: float) -> tuple[Any, Any]:
        """Waits for both. Who fails first is reported: the other often only waits for it."""
        end = time.monotonic() + timeout
        results: dict[str, Any] = {}
        open_ = list(self._peers)
        while open_:
            ready = wait(open_, max(0.0, end - time.monotonic()))
            if not ready:
                names = " and ".join(peer.name for peer in open_)
                raise BenchError(f"no answer from {names} in {timeout:g} s")
            for peer in ready:
                open_.remove(peer)
                results[peer.name] = peer.result()
        return results["worker"], results["server"]


@contextlib.contextmanager
def pair(nodes: Nodes, transport: str, cores: tuple[int, int] | None) -> Iterator[Pair]:
    """Starts both processes, connects them, and ends them."""
    worker_core, server_core = cores or (None, None)
    with _port() as address:
        server = Peer("server", nodes.server, address, transport, server_core)
        worker = Peer("worker", nodes.worker, address, transport, worker_core)
        good = False
        try:
            two = Pair(worker, server)
            two.results(START_TIMEOUT)
            yield two
            good = True
        finally:
            for peer in (worker, server):
                if good:
                    with contextlib.suppress(OSError):
                        peer.tell("end")
            for peer in (worker, server):
                peer.end(30 if good else 0)


@contextlib.contextmanager
def _port() -> Iterator[str]:
    """A port of loopback that nobody else is given meanwhile: a socket that is bound and does
    not listen holds it, and the scheduler, which sets SO_REUSEADDR too, can listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def _child(
    conn: Connection, name: str, factory: Factory, address: str, transport: str, core: int | None
) -> None:
    """Life of one process: pinned before any library starts a thread, then a node, then orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if core is not None:
        os.sched_setaffinity(0, {core})
    for variable in list(os.environ):
        if variable.startswith(("DMLC_", "STEPMESH_")):  # roles, ranks and addresses of others
            del os.environ[variable]
    try:
        from . import peers

        with factory(address, transport) as node:
            peer = peers.ROLES[name](node)
            conn.send((True, None))
            while True:
                method, args = conn.recv()
                if method == "end":
                    break
                conn.send((True, getattr(peer, method)(*args)))
    except EOFError:
        sys.exit(1)  # the parent is gone
    except BaseException:
        with contextlib.suppress(OSError):
            conn.send((False, traceback.format_exc()))
        sys.exit(1)


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark with two processes has."""
    parser.add_argument("--transport", default="tcp", help="transport to measure (default tcp)")
    parser.add_argument(
        "--cores",
        type=_cores,
        metavar="A,B",
        help="cores of worker and server (default: the first two that we may use)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int] | None:
    """The cores of worker and server; None where processes cannot be pinned."""
    if not hasattr(os, "sched_getaffinity"):
        print("bench: this system cannot pin processes: expect noise", file=sys.stderr)
        return None
    usable = sorted(os.sched_getaffinity(0))
    if asked is None:
        asked = (usable[0], usable[1 if len(usable) > 1 else 0])
    for core in asked:
        if core not in usable:
            raise BenchError(f"--cores: core {core}: want one of {_ranges(usable)}")
    if asked[0] == asked[1]:
        print(
            f"bench: both processes share core {asked[0]}: times are those of the kernel's "
            "scheduler, not of a transport",
            file=sys.stderr,
        )
    return asked


def _cores(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: want two core numbers, A,B")
    return int(parts[0]), int(parts[1])


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers, shortened: 0-3,8."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
