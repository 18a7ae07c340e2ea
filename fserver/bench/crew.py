"""Pinned processes, each with one node or several, that do what the parent tells them.

The parent measures nothing itself: while the others are busy it is blocked.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fserver import Error

from .errors import BenchError, WrongDataError
from .host import OTHERS, environment, first_on_path, free_port, secret, transport_settings

START_TIMEOUT = 180.0  # seconds; imports of torch on a busy machine
TIMEOUT = 600.0  # seconds; what a benchmark does between two answers
KILL_TIMEOUT = 10.0  # seconds; what the kernel takes to end a process, with all its memory


@dataclass(frozen=True)
class Place:
    """Where a node is in its cluster: what it takes to make it."""

    role: str  # "worker" or "server"
    rank: int
    workers: int
    servers: int
    scheduler: str
    settings: dict[str, str]
    host: str | None = None  # its address; None: chosen
    gpu: int | None = None  # that its tensors are on; None: the CPU


Factory = Callable[[Place], Any]
"""Makes a node, connected; the node is a context manager."""


def real_node(place: Place) -> Any:
    """A node of fserver. Server 0 has the scheduler in it."""
    import fserver

    options: dict[str, Any] = {
        "scheduler": place.scheduler,
        "workers": place.workers,
        "servers": place.servers,
        "node_rank": place.rank,
        "host": place.host,
        "settings": place.settings,
        "init_timeout": START_TIMEOUT,
    }
    if place.gpu is not None:
        options.update(backend="GPU", gpu=place.gpu, rank_offset=-place.gpu)
    if place.role == "worker":
        return fserver.Worker(**options)
    return fserver.Server(**options, host_scheduler=place.rank == 0)


@dataclass(frozen=True)
class Nodes:
    """Who plays: fserver, or what a test puts in its place. Picklable."""

    worker: Factory = real_node
    server: Factory = real_node


@dataclass(frozen=True)
class Case:
    """What an exchange moves.

    Each worker pushes tensors of `out` bytes to all servers, and each server answers it with
    tensors of `back` bytes: with those that it got (op push_pull, if they are as large), with its
    own (else, and pull), or with none (push; back is empty). There are `stages` sets of tensors,
    used in turn; the keys of a set follow on `key` and on each other. Each tensor has at least 8
    bytes. Rounds are counted in units of `unit` exchanges, a multiple of `stages`. With `shared`,
    what is pushed is in shared memory. `device` is "cpu" or "gpu"; with "gpu" so must be the
    cluster's.
    """

    op: str
    out: tuple[int, ...]
    back: tuple[int, ...] = ()
    key: int = 0
    stages: int = 1
    unit: int = 1
    shared: bool = False
    device: str = "cpu"

    @property
    def echoes(self) -> bool:
        """The answer is what came."""
        return self.op == "push_pull" and self.out == self.back


@dataclass(frozen=True)
class Member:
    """A process of the crew, with nodes of one role.

    `actor` is the class that obeys in it: "module.Class" of this package, or a class. It is made
    with a Factory and `args`.
    """

    name: str
    actor: str | type
    role: str
    core: int | None = None
    nodes: int = 1
    args: tuple[Any, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment, and no fork
    path: Path | None = None  # its sys.path begins with this folder, and no fork

    @property
    def fresh(self) -> bool:
        """It needs an environment of its own from the start, so it is no fork."""
        return bool(self.variables) or self.path is not None


class Peer:
    """One of the processes, seen from the parent. A process that somebody else started ends by
    itself."""

    def __init__(self, member: Member, conn: Connection, process: Any = None):
        self.name, self.member = member.name, member
        self._conn, self._process = conn, process

    @classmethod
    def spawn(cls, member: Member, nodes: Nodes) -> "Peer":
        """Starts the process: a fork of one that has torch imported and nothing running, or, where
        it needs an environment of its own from the start, a new one.

        Raises:
            BenchError: it cannot be started.
        """
        context: Any = multiprocessing.get_context("spawn" if member.fresh else "forkserver")
        if not member.fresh:
            context.set_forkserver_preload([f"{__package__}.actors"])
        conn, theirs = context.Pipe()
        make = nodes.worker if member.role == "worker" else nodes.server
        process = context.Process(target=_child, args=(theirs, member, make), daemon=True)
        with environment(member.variables), first_on_path(member.path):
            try:
                process.start()
            except (EOFError, OSError) as error:
                gone = isinstance(error, EOFError)
                why = "the fork server of multiprocessing has ended" if gone else error
                raise BenchError(
                    f"the {member.name} cannot be started: {why} (check for a killed process, free "
                    "memory, and the limit of processes, ulimit -u)"
                ) from None
        theirs.close()
        return cls(member, conn, process)

    def fileno(self) -> int:
        """Readable when `result` does not block."""
        return self._conn.fileno()

    def tell(self, method: str, *args: Any) -> None:
        """Starts a method of the peer; `result` waits for it."""
        self._conn.send((method, args))

    def result(self) -> Any:
        """What the method returned; waits for it."""
        try:
            outcome, value = self._conn.recv()
        except (EOFError, ConnectionResetError):
            status = ""
            if self._process is not None:
                self._process.join(5)
                status = f" with status {self._process.exitcode}"
            raise BenchError(f"the {self.name} ended{status}") from None
        if outcome == "wrong":
            raise WrongDataError(f"the {self.name} received wrong data: {value}")
        if outcome != "ok":
            text, reason = value
            raise BenchError(f"the {self.name} failed: {text}", reason)
        return value

    def end(self, timeout: float) -> None:
        """Waits for the process to end by itself, then ends it.

        Raises:
            BenchError: it is still there. Then this process leaves without it, with status 1.
        """
        try:
            if self._process is not None:
                self._end(timeout)
        finally:
            self._conn.close()

    def _end(self, timeout: float) -> None:
        self._process.join(timeout)
        if not self._process.is_alive():
            return
        self._process.kill()
        self._process.join(KILL_TIMEOUT)
        if self._process.is_alive():
            atexit.register(_leave)
            raise BenchError(
                f"the {self.name} (pid {self._process.pid}) has not ended {KILL_TIMEOUT:g} s after "
                f"SIGKILL, because the kernel holds it (/proc/{self._process.pid}/stack shows "
                f"where; if a driver does not return, restart the host)"
            )


class Crew:
    """The processes of a benchmark, and at most one cluster at a time of nodes in them."""

    def __init__(self, peers: Sequence[Peer]):
        self.peers = list(peers)
        self.gpus = (0, 0)  # of workers and servers, if their tensors are on GPUs

    def __getitem__(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def all(self, method: str, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Runs the method of that name in all; gives their results in order."""
        for peer in self.peers:
            peer.tell(method, *args)
        return self.results(timeout)

    def workers(self, method: str, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """The same; only the results of processes that hold workers."""
        results = zip(self.peers, self.all(method, *args, timeout=timeout), strict=True)
        return [result for peer, result in results if peer.member.role == "worker"]

    def one(self, name: str, method: str, *args: Any) -> Any:
        """Runs a method in one process alone."""
        self[name].tell(method, *args)
        return self.results(peers=[self[name]])[0]

    def transport(self) -> str:
        """What the first process that holds workers uses; "a+b" if that is several."""
        return "+".join(self.workers("links")[0])

    def results(self, timeout: float = TIMEOUT, peers: Sequence[Peer] | None = None) -> list[Any]:
        """Waits for all (of `peers`).

        Raises:
            WrongDataError: one of them got wrong data.
            BenchError: one of them failed. Who fails first is reported, and who has failed by
                then: the others often only wait for it.
        """
        peers = self.peers if peers is None else peers
        end = time.monotonic() + timeout
        results: dict[str, Any] = {}
        waiting = list(peers)
        while waiting:
            ready = wait([peer.fileno() for peer in waiting], max(0.0, end - time.monotonic()))
            if not ready:
                names = " and ".join(peer.name for peer in waiting)
                raise BenchError(f"no answer from {names} within {timeout:g} s")
            failures = []
            for peer in [one for one in waiting if one.fileno() in ready]:
                waiting.remove(peer)
                try:
                    results[peer.name] = peer.result()
                except BenchError as error:
                    failures.append(error)
            wrong = [error for error in failures if isinstance(error, WrongDataError)]
            if wrong or len(failures) == 1:
                raise (wrong or failures)[0]
            if failures:
                raise BenchError("\n".join(map(str, failures)), failures[0].reason)
        return [results[peer.name] for peer in peers]

    @contextlib.contextmanager
    def cluster(
        self,
        transport: str,
        counts: Mapping[str, int] | None = None,
        host: str | None = None,
        scheduler: str | None = None,
        device: str = "cpu",
        near: str | None = None,
        by_role: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Iterator[None]:
        """Makes nodes in the processes, connects them, and lets them leave together.

        Args:
            transport: what carries the bytes.
            counts: nodes of a process, by its name (default: what its member says).
            host: address of this host for all of them (default 127.0.0.1).
            scheduler: "host:port". Then the crew is one process with one node, and its
                counterpart is elsewhere.
            device: where tensors are: "cpu", or "gpu": those of workers on the first, those of
                servers on the last GPU.
            near: address of this host for the scheduler alone (default: host).
            by_role: more settings of workers and of servers.
        """
        sizes = [(counts or {}).get(p.name, p.member.nodes) for p in self.peers]
        total = {"worker": 0, "server": 0}
        for peer, size in zip(self.peers, sizes, strict=True):
            total[peer.member.role] += size
        if scheduler:
            total = {"worker": 1, "server": 1}
        settings = {**transport_settings(transport), **({} if scheduler else secret())}
        with contextlib.ExitStack() as stack:
            address = scheduler or stack.enter_context(free_port(near or host or "127.0.0.1"))
            given = {"worker": 0, "server": 0}
            if device == "gpu":
                self.gpus = (0, max(self.one(self.peers[0].name, "gpus") - 1, 0))
            for peer, size in zip(self.peers, sizes, strict=True):
                role = peer.member.role
                ranks = range(given[role], given[role] + size)
                given[role] += size
                gpu = self.gpus[role == "server"] if device == "gpu" else None
                own = {**settings, **(by_role or {}).get(role, {})}
                where = total["worker"], total["server"], address, own, host, gpu
                peer.tell("connect", [Place(role, rank, *where) for rank in ranks])
            self.results(START_TIMEOUT)
            yield
            self.all("leave")


@contextlib.contextmanager
def start(members: Sequence[Member], nodes: Nodes) -> Iterator[Crew]:
    """Starts the processes, and ends them."""
    peers: list[Peer] = []
    with ending(peers):
        for member in members:
            peers.append(Peer.spawn(member, nodes))
        crew = Crew(peers)
        crew.results(START_TIMEOUT)
        yield crew


@contextlib.contextmanager
def ending(peers: list[Peer]) -> Iterator[None]:
    """Ends the processes with the block: at once if it failed."""
    good = False
    try:
        yield
        good = True
    finally:
        for peer in peers:
            if good:
                with contextlib.suppress(OSError):
                    peer.tell("end")
        try:
            end_all(peers, 30 if good else 0)
        except BenchError as error:
            if good:
                raise
            print(f"bench: {error}", file=sys.stderr)  # beside what the block failed with


def end_all(peers: Sequence[Peer], patience: float) -> None:
    """Ends the processes, which have so many seconds each to do it themselves.

    Raises:
        BenchError: one of them is still there. The others have ended.
    """
    with contextlib.ExitStack() as stack:
        for peer in reversed(peers):
            stack.callback(peer.end, patience)


def _leave() -> None:
    """Ends this process at once: the ordinary way waits for its processes without limit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def pair(
    nodes: Nodes,
    transport: str,
    cores: tuple[int, int] | None,
    worker: str | type = "actors.WorkerActor",
    server: str | type = "actors.ServerActor",
    **how: Any,
) -> Iterator[Crew]:
    """A worker and a server, connected; `how` is of Crew.cluster. Results come in this order."""
    with start(pair_of(cores, worker, server), nodes) as crew, crew.cluster(transport, **how):
        yield crew


def pair_of(
    cores: tuple[int, int] | None,
    worker: str | type = "actors.WorkerActor",
    server: str | type = "actors.ServerActor",
    **more: Any,
) -> list[Member]:
    """The members of a pair; `more` is of both."""
    worker_core, server_core = cores or (None, None)
    return [
        Member("worker", worker, "worker", worker_core, **more),
        Member("server", server, "server", server_core, **more),
    ]


def _child(conn: Connection, member: Member, make: Factory) -> None:
    """Life of one process: pinned before any library starts a thread, then orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if member.core is not None:
        os.sched_setaffinity(0, {member.core})
    for variable in list(os.environ):
        if variable.startswith(OTHERS):
            del os.environ[variable]
    os.environ["STEPMESH_BACKEND"] = "CPU"  # but for those with a Place on a GPU
    obey(conn, lambda: load(member.actor)(make, *member.args))


def load(actor: str | type) -> type:
    """The class that "module.Class" of this package names."""
    if isinstance(actor, type):
        return actor
    module, _, name = actor.rpartition(".")
    found: type = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


def obey(conn: Connection, make: Callable[[], Any]) -> None:
    """Does what the parent says until it says "end"; ends the process with status 1 if it fails.

    Each answer is a pair: "ok" and what the method returned, "wrong" and the text of a
    WrongDataError, or "failed", what to print and the text of the error.
    """
    actor = None
    try:
        actor = make()
        conn.send(("ok", None))
        while True:
            method, args = conn.recv()
            if method == "end":
                return
            conn.send(("ok", getattr(actor, method)(*args)))
    except EOFError:
        status = 1  # the parent is gone
    except WrongDataError as error:
        status = _report(conn, "wrong", str(error))
    except BaseException as error:
        expected = isinstance(error, Error)  # its text says it all
        text = str(error) if expected else f"\n{traceback.format_exc()}"
        status = _report(conn, "failed", (text, str(error)))
    if actor is not None:
        actor.close()
    sys.exit(status)


def _report(conn: Connection, outcome: str, value: Any) -> int:
    with contextlib.suppress(OSError):
        conn.send((outcome, value))
    return 1
