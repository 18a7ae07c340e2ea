"""Pinned processes, each with one node or several, that do what the parent tells them.

The parent measures nothing itself: it is blocked while the others are busy.
"""

import atexit
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pkgutil
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
from .host import OTHERS, environment, free_port, secret, transport_settings

START_TIMEOUT = 180.0  # seconds; imports of torch on a busy machine
SERVE_S = 24 * 3600.0  # for the server of two hosts
TIMEOUT = 600.0  # seconds; what a benchmark does between two answers
PARTING_S = 1.0  # for the others to say what they have seen, once one has failed
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

    how: dict[str, Any] = dataclasses.asdict(place)
    role, rank, gpu = how.pop("role"), how.pop("rank"), how.pop("gpu")
    if gpu is not None:
        how.update(backend="GPU", gpu=gpu, rank_offset=-gpu)
    if role == "server":
        how.update(host_scheduler=rank == 0)
    make = fserver.Worker if role == "worker" else fserver.Server
    return make(**how, node_rank=rank, init_timeout=START_TIMEOUT)


@dataclass(frozen=True)
class Nodes:
    """Who plays: fserver, or what a test puts in its place. Picklable."""

    worker: Factory = real_node
    server: Factory = real_node


@dataclass(frozen=True)
class Case:
    """What an exchange moves: each worker pushes tensors of `out` bytes to all servers. A server
    answers with what came (op push_pull, if `back` is as large), with tensors of its own (else,
    and pull) or with none (push). Each tensor has at least 8 bytes."""

    op: str
    out: tuple[int, ...]
    back: tuple[int, ...] = ()
    key: int = 0  # the first one; the others follow
    stages: int = 1  # sets of tensors, used in turn, each with keys of its own
    unit: int = 1  # exchanges that are counted as one: a multiple of the stages
    shared: bool = False  # what is pushed is in shared memory
    device: str = "cpu"  # or "gpu", as that of the cluster

    @property
    def echoes(self) -> bool:
        """The answer is what came."""
        return self.op == "push_pull" and self.out == self.back


@dataclass(frozen=True)
class Member:
    """A process of the crew, with nodes of one role. `actor` is the class that obeys in it, made
    with a Factory and `args`: "module.Class" of this package, or a class."""

    name: str
    actor: str | type
    role: str
    core: int | None = None
    nodes: int = 1
    args: tuple[Any, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment, and no fork
    path: Path | None = None  # its sys.path begins with this folder, and no fork


class Peer:
    """One of the processes, seen from the parent."""

    def __init__(self, member: Member, conn: Connection, process: Any):
        self.name, self.member, self.conn, self.process = member.name, member, conn, process

    @classmethod
    def spawn(cls, member: Member, nodes: Nodes) -> "Peer":
        """Starts the process: a fork of one that has torch imported and nothing running, or, where
        it needs an environment of its own from the start, a new one."""
        fresh = member.variables or member.path
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            context.set_forkserver_preload([f"{__package__}.actors"])
        conn, theirs = context.Pipe()
        make = nodes.worker if member.role == "worker" else nodes.server
        process = context.Process(target=_child, args=(theirs, member, make), daemon=True)
        path = list(sys.path)
        try:
            if member.path:
                sys.path.insert(0, str(member.path))
            with environment(member.variables):
                process.start()
        except (EOFError, OSError) as error:  # EOFError: the fork server has ended
            raise BenchError(
                f"the {member.name} cannot be started: {error!r} (check for a killed process, free "
                "memory, and the limit of processes, ulimit -u)"
            ) from None
        finally:
            sys.path[:] = path
        theirs.close()
        return cls(member, conn, process)

    def tell(self, method: str, *args: Any) -> None:
        """Starts a method of the peer; `result` waits for it. A peer that is gone says so there."""
        with contextlib.suppress(OSError):
            self.conn.send((method, args))

    def result(self) -> Any:
        """What the method returned; waits for it. Raises BenchError: it failed, or has ended."""
        try:
            error, value, reason = self.conn.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            text = f"the {self.name} ended with status {self.process.exitcode}"
            raise BenchError(text) from None
        if error:
            raise error(f"the {self.name} {value}", reason)
        return value

    def end(self, timeout: float) -> None:
        """Waits for the process to end by itself, then ends it. One that is still there is left
        behind, and at its end this process does not wait for it, as it would without limit."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(KILL_TIMEOUT)
        if self.process.is_alive():
            name = f"the {self.name} (pid {self.process.pid})"
            text = f"{name} has not ended {KILL_TIMEOUT:g} s after SIGKILL: the kernel holds it"
            print(f"bench: {text} (/proc/{self.process.pid}/stack shows where)", file=sys.stderr)
            atexit.register(os._exit, 1)
        self.conn.close()


class Crew:
    """The processes of a benchmark, and at most one cluster at a time of nodes in them. They end
    with the first error."""

    def __init__(self, peers: Sequence[Peer]):
        self.peers = list(peers)
        self.gpus = (0, 0)  # of workers and servers, if their tensors are on GPUs

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
        [peer] = [peer for peer in self.peers if peer.name == name]
        peer.tell(method, *args)
        return self.results(TIMEOUT, [peer])[0]

    def transport(self) -> str:
        """What the first process that holds workers uses; "a+b" if that is several."""
        return "+".join(self.workers("links")[0])

    def results(self, limit: float = START_TIMEOUT, of: Sequence[Peer] | None = None) -> list[Any]:
        """Waits for all (of these): that they have started, or what a method returned.

        Raises:
            BenchError: one failed or took too long. The others have PARTING_S to say what they
                have seen, as the first may only have waited for another. Wrong data goes first.
        """
        asked = self.peers if of is None else of
        waiting = {peer.conn: peer for peer in asked}
        found: dict[str, Any] = {}
        errors: list[BenchError] = []
        end = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for peer in [waiting.pop(conn) for conn in list(waiting) if conn in ready]:
                try:
                    found[peer.name] = peer.result()
                except BenchError as error:
                    errors.append(error)
                    end = min(end, time.monotonic() + PARTING_S)
        if waiting and not errors:
            names = " and ".join(peer.name for peer in waiting.values())
            errors = [BenchError(f"no answer from {names} within {limit:g} s")]
        if errors:
            self.close(0)
            told = [error for error in errors if isinstance(error, WrongDataError)] or errors
            raise type(told[0])("\n".join(map(str, told)), told[0].reason)
        return [found[peer.name] for peer in asked]

    def close(self, patience: float = 2) -> None:
        """Ends the processes, which have so many seconds each to do it themselves."""
        peers, self.peers = self.peers, []
        for peer in peers if patience else ():
            peer.tell("end")
        for peer in peers:
            peer.end(patience)

    @contextlib.contextmanager
    def cluster(
        self,
        transport: str,
        counts: Mapping[str, int] | None = None,
        host: str | None = None,
        scheduler: str | None = None,
        device: str = "cpu",
        by_role: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Iterator[None]:
        """Makes nodes in the processes, connects them, and lets them leave together.

        Args:
            counts: nodes of a process, by its name (default: what its member says).
            host: address of this host for all of them (default 127.0.0.1).
            scheduler: "host:port", if the counterpart of the one process is on another host.
            device: "gpu": tensors of workers are on the first, those of servers on the last GPU.
            by_role: more settings of workers and of servers.
        """
        sizes = {p.name: (counts or {}).get(p.name, p.member.nodes) for p in self.peers}
        total = {"worker": 0, "server": 0}
        for peer in self.peers:
            total[peer.member.role] += sizes[peer.name]
        if scheduler:
            total = {"worker": 1, "server": 1}
        if device == "gpu":
            import torch  # takes seconds

            self.gpus = (0, max(torch.cuda.device_count() - 1, 0))
        settings = {**transport_settings(transport), **({} if scheduler else secret())}
        ranks = {role: itertools.count() for role in total}
        with contextlib.ExitStack() as stack:
            address = scheduler or stack.enter_context(free_port(host or "127.0.0.1"))
            for peer in self.peers:
                role = peer.member.role
                gpu = self.gpus[role == "server"] if device == "gpu" else None
                own = {**settings, **(by_role or {}).get(role, {})}
                where = total["worker"], total["server"], address, own, host, gpu
                mine = itertools.islice(ranks[role], sizes[peer.name])
                peer.tell("connect", [Place(role, rank, *where) for rank in mine])
            self.results()
            yield
            self.all("leave")


def spawned(members: Sequence[Member], nodes: Nodes) -> list[Peer]:
    """Starts the processes. If one cannot be started, the others end."""
    crew = Crew([])
    try:
        for member in members:
            crew.peers.append(Peer.spawn(member, nodes))
    except BaseException:
        crew.close(0)
        raise
    return crew.peers


@contextlib.contextmanager
def start(members: Sequence[Member], nodes: Nodes) -> Iterator[Crew]:
    """Starts the processes, and ends them with the block: at once if it failed."""
    crew, patience = Crew(spawned(members, nodes)), 0.0
    try:
        crew.results()
        yield crew
        patience = 30.0
    finally:
        crew.close(patience)


@contextlib.contextmanager
def connected(
    members: Sequence[Member], nodes: Nodes, transport: str, **how: Any
) -> Iterator[Crew]:
    """Starts the processes, with a cluster of nodes in them; `how` is of Crew.cluster."""
    with start(members, nodes) as crew, crew.cluster(transport, **how):
        yield crew


def pair_of(
    cores: tuple[int, int] | None,
    worker: str | type = "actors.WorkerActor",
    server: str | type = "actors.ServerActor",
    **more: Any,
) -> list[Member]:
    """The members of a pair; `more` is of both."""
    ours, theirs = cores or (None, None)
    return [
        Member("worker", worker, "worker", ours, **more),
        Member("server", server, "server", theirs, **more),
    ]


def members(
    cores: tuple[int, int], role: str | None, worker: str | type = "remote.CommandingWorker"
) -> list[Member]:
    """The processes of this host: a pair, or the one of this role."""
    if not role:
        return pair_of(cores)
    is_server = role == "server"
    return [Member(role, "remote.ObeyingServer" if is_server else worker, role, cores[is_server])]


def serve(connected: contextlib.AbstractContextManager[Crew], scheduler: str) -> None:
    """Does what the worker of the other host says, until it has left."""
    print(f"bench: waiting for the worker at {scheduler}", file=sys.stderr)
    with connected as crew:
        crew.all("serve", timeout=SERVE_S)


def _child(conn: Connection, member: Member, make: Factory) -> None:
    """Life of one process: pinned before any library starts a thread, then orders until "end".

    An answer is a class of error, or None, and what it is about: the text and the reason, or what
    the method returned. After an error the process ends with status 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if member.core is not None:
        os.sched_setaffinity(0, {member.core})
    for variable in [name for name in os.environ if name.startswith(OTHERS)]:
        del os.environ[variable]
    os.environ["STEPMESH_BACKEND"] = "CPU"  # but for those with a Place on a GPU
    made: Any = member.actor
    actor = None
    answer: tuple[type[BenchError], str, str | None]
    try:
        if isinstance(made, str):
            made = pkgutil.resolve_name(f"{__package__}.{made.replace('.', ':')}")
        actor = made(make, *member.args)
        conn.send((None, None, None))
        while True:
            method, args = conn.recv()
            if method == "end":
                return
            conn.send((None, getattr(actor, method)(*args), None))
    except WrongDataError as error:
        answer = WrongDataError, f"received wrong data: {error}", None
    except ModuleNotFoundError as error:
        answer = BenchError, f"failed: {error} (install it)", str(error)
    except BaseException as error:
        text = str(error) if isinstance(error, Error) else f"\n{traceback.format_exc()}"
        answer = BenchError, f"failed: {text}", str(error)
    with contextlib.suppress(OSError):
        conn.send(answer)
    if actor is not None:
        actor.close()
    sys.exit(1)
