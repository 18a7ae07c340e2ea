"""Pinned processes, each with one node or several, that do what the parent tells them. The parent
measures nothing itself: it is blocked while they are busy."""

import contextlib
import dataclasses
import itertools
import os
import pkgutil
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from fserver import Error
from fserver.run import free_port

from .errors import BenchError
from .processes import Child, gather
from .report import Figures

OTHERS = ("DMLC_", "STEPMESH_")  # variables with roles, ranks and addresses of others
KEPT = ("DMLC_INTERFACE", "STEPMESH_SPLIT_QP_LAG")  # but these choose what is measured
START_TIMEOUT = 180.0  # seconds; imports of torch on a busy machine
TIMEOUT = 600.0  # seconds; what a benchmark does between two answers
PARTING_S = 1.0  # for the others to say what they have seen, once one has failed


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


# Makes a node, connected; the node is a context manager.
Factory = Callable[[Place], Any]


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


# Who plays: fserver, or what a test puts in its place.
MAKE: dict[str, Factory] = {"worker": real_node, "server": real_node}


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
    servers: int = 1  # to which all of it goes, and from which it comes

    @property
    def moved(self) -> tuple[int, int]:
        """The bytes of one worker, there and home."""
        return self.servers * sum(self.out), self.servers * sum(self.back)

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
    cores: Sequence[int] = ()  # if there are any, the process is pinned to them
    nodes: int = 1
    args: tuple[Any, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment, and no fork


class Crew:
    """The processes of a benchmark, and at most one cluster at a time of nodes in them. They end
    with the first error, and with the block: at once if it failed. Like other players, a crew has
    prepare, check, measure, and `unit`, the number of exchanges that `measure` counts as one."""

    unit, shared = 1, False  # shared: what is pushed is in shared memory
    _p50_us = 0.0  # of the last round

    def __init__(self, members: Sequence[Member], limit: float = TIMEOUT):
        """`limit`: seconds that a method may take."""
        self.limit, self.members, self.peers = limit, members, list[Child]()
        self.gpus = (0, 0)  # of workers and servers, if their tensors are on GPUs
        try:
            for m in members:
                self.peers.append(Child(m.name, _child, m, MAKE[m.role], **m.variables))
        except BaseException:
            self.close(0)
            raise

    def __enter__(self) -> "Crew":
        self.results(START_TIMEOUT)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(0 if error else 30)

    def all(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Runs the method of that name in all; gives their results in order."""
        for peer in self.peers:
            peer.put((method, *args))
        return self.results(limit or self.limit)

    def prepare(self, case: Case) -> None:
        self.unit = case.unit
        self.all("prepare", dataclasses.replace(case, shared=self.shared))

    def check(self, seed: int) -> None:
        """Outside of the timed part: exchanges that are compared byte by byte."""
        self.all("verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        """One round; p50_us is of a single exchange, of the slowest process with workers."""
        # More time by ten times what is to be expected, if exchanges take as long as the last ones.
        limit = self.limit + 1e-5 * (warmup + count) * self.unit * self._p50_us
        results = filter(None, self.all("measure", warmup, count, limit=limit))  # None: of a server
        nobody = {"p50_us": 0.0}  # of two hosts, that of the server
        found: Figures = max(results, key=lambda figures: figures["p50_us"], default=nobody)
        self._p50_us = found["p50_us"]
        return found

    def transport(self) -> str:
        """What the first process that holds workers uses; "a+b" if that is several."""
        return "+".join(self.all("links")[0])

    def results(self, limit: float) -> list[Any]:
        """Waits for all: that they have started, or what a method returned."""
        try:
            return gather(self.peers, limit, PARTING_S)
        except BenchError:
            self.close(0)
            raise

    def close(self, patience: float = 2) -> None:
        """Ends the processes, which have so many seconds each to do it themselves."""
        peers, self.peers = self.peers, []
        for peer in peers if patience else ():
            peer.put(())
        for peer in peers:
            peer.close(patience)

    @contextlib.contextmanager
    def cluster(
        self,
        transport: str,
        host: str | None = None,
        scheduler: str | None = None,
        device: str = "cpu",
    ) -> Iterator[None]:
        """Makes nodes in the processes, connects them, and lets them leave together.

        Args:
            host: address of this host for all of them (default 127.0.0.1).
            scheduler: "host:port", if the counterpart of the one process is on another host.
            device: "gpu": tensors of workers are on the first, those of servers on the last GPU.
        """
        total = {role: sum(m.nodes for m in self.members if m.role == role) for role in MAKE}
        if scheduler:
            total = {"worker": 1, "server": 1}
        if device == "gpu":
            import torch  # takes seconds

            self.gpus = (0, max(torch.cuda.device_count() - 1, 0))
        settings = settings_of(transport, one_host=not scheduler)
        ranks = {role: itertools.count() for role in total}
        with contextlib.ExitStack() as stack:
            address = scheduler or stack.enter_context(free_port(host or "127.0.0.1"))
            for member, peer in zip(self.members, self.peers, strict=True):
                role = member.role
                gpu = self.gpus[role == "server"] if device == "gpu" else None
                where = total["worker"], total["server"], address, settings, host, gpu
                mine = itertools.islice(ranks[role], member.nodes)
                peer.put(("connect", [Place(role, rank, *where) for rank in mine]))
            self.results(START_TIMEOUT)
            yield
            self.all("leave")


def settings_of(transport: str, one_host: bool) -> dict[str, str]:
    """A transport, and for one host a secret, unless there is one in the environment."""
    found = {"FSERVER_TRANSPORT": transport, "BYTEPS_ENABLE_IPC": "1"}
    if one_host and not {"FSERVER_SECRET", "FSERVER_SECRET_FILE"} & set(os.environ):
        found["FSERVER_SECRET"] = secrets.token_hex(16)
    return found


def members(
    cores: tuple[int, int] | None,
    worker: str | type = "actors.WorkerActor",
    server: str | type = "actors.ServerActor",
    counts: tuple[int, int] = (1, 1),
    groups: int = 1,
    **more: Any,
) -> list[Member]:
    """The processes of workers, with so many nodes each, and of servers. `more` is of all."""
    one, two = ([core] for core in cores) if cores else ([], [])
    kinds = ("worker", worker, one, groups, counts[0]), ("server", server, two, 1, counts[1])
    return [
        Member(kind if count == 1 else f"{kind} {i}", actor, kind, core, nodes, **more)
        for kind, actor, core, nodes, count in kinds
        for i in range(count)
    ]


def _child(conn: Connection, member: Member, make: Factory) -> None:
    """Life of one process: pinned before any library starts a thread, then orders until the end.
    It sends None when it has started, then what each method returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if member.cores:
        os.sched_setaffinity(0, member.cores)
    for variable in [v for v in os.environ if v.startswith(OTHERS) and v not in KEPT]:
        del os.environ[variable]
    os.environ["STEPMESH_BACKEND"] = "CPU"  # but for those with a Place on a GPU
    made = member.actor
    try:
        if isinstance(made, str):
            made = pkgutil.resolve_name(f"{__package__}.{made.replace('.', ':')}")
        actor = made(make, *member.args)
        Finalize(None, actor.close, exitpriority=0)  # when an error has been sent
        conn.send(None)
        while order := conn.recv():
            method, *arguments = order
            conn.send(getattr(actor, method)(*arguments))
    except Error as error:
        raise BenchError(str(error)) from None
