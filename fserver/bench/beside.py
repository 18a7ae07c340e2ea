"""Others' ways as players beside ours: each has two processes of its own, on the same two GPUs or
on the CPU, in which the host waits for its stream at each round trip, as push_pull and wait do.

What goes wrong with one of them is its own affair: it is out, with its processes, and says why.
"""

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from . import others, ways
from .crew import Crew, Member, Nodes, Peer, Place, end_all, start
from .errors import BenchError, GaveUpError, WrongDataError
from .parts import POISON, Part, first_difference, own_seed
from .report import Figures, figures

WAYS = (*ways.ON_GPUS, *ways.ON_CPU)
START = 120.0  # seconds; imports of torch in many processes
LIMIT = 20.0  # seconds; what is done in one go, the first of which takes longest; to join: twice
APART = 0.5  # seconds; so that the two do not say at the same time where they hang
CORES = 4  # of each process


class Side:
    """One of the two processes of a way."""

    def __init__(self, place: Place, way: str, link: Connection, room: int, cores: Sequence[int]):
        """Joins the other. `room`: bytes of the largest message; `cores`: its own, if any."""
        if cores:
            os.sched_setaffinity(0, set(cores))
        self.index = int(place.role == "server")
        self._link = link
        if place.gpu is None:
            self.device = torch.device("cpu")
        else:
            self.device = torch.device("cuda", place.gpu)
            torch.cuda.set_device(self.device)
            torch.ones(1, device=self.device).add_(1).item()
            torch.cuda.set_stream(torch.cuda.Stream())
        self.open = ways.join(way, self, room)

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def exchange(self, mine: Any) -> Any:
        """Gives the other side an object and takes its own."""
        self._link.send(mine)
        return self._link.recv()

    def barrier(self) -> None:
        """Waits for the other side."""
        self.exchange(None)

    def settle(self) -> None:
        """Waits for what is on the stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class OtherPart(Part):
    """One side, and its round trips."""

    def within(self, limit: float, method: str, *args: Any) -> Any:
        """Calls a method, and prints where it is if that takes longer."""
        faulthandler.enable()
        faulthandler.dump_traceback_later(limit)
        result = getattr(self, method)(*args)
        faulthandler.cancel_dump_traceback_later()
        return result

    def prepare(self, out: int, back: int) -> None:
        """Opens the way for so many bytes there and home."""
        self.side = self.nodes[0]
        sizes = (back, out) if self.side.index else (out, back)
        self.way = self.side.open(*sizes)

    def trip(self) -> None:
        """One round trip; the first side's is over when the answer is there."""
        first, second = self.way.send, self.way.recv
        if self.side.index:
            first, second = second, first
        first()
        second()
        self.side.settle()

    def verify(self, seed: int) -> None:
        """A round trip of new data into poisoned memory, compared byte by byte."""
        way, roles = self.way, ("worker", "server")
        mine, theirs = (
            own_seed(seed, roles[i], 0, 0) for i in (self.side.index, 1 - self.side.index)
        )
        self.pattern.fill(way.source, mine)
        way.landing.fill_(POISON)
        self.side.settle()
        self.side.barrier()
        self.trip()
        want = torch.empty_like(way.landing)
        self.pattern.fill(want, theirs)
        difference = first_difference(way.landing, want)
        if difference:
            raise WrongDataError(difference)
        self.side.barrier()

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """Times `count` round trips on the side that begins."""
        for _ in range(warmup):
            self.trip()
        now, samples = time.perf_counter_ns, []
        for _ in range(count):
            start = now()
            self.trip()
            samples.append(now() - start)
        return figures(samples)


class WirePart(Part):
    """A process that sees both GPUs."""

    def wire(self, first: int, last: int) -> dict[str, Any]:
        """ways.wire."""
        return ways.wire((first, last))


def wire(gpus: tuple[int, int]) -> Figures:
    """The same in a process of its own.

    Raises:
        BenchError: that went wrong.
    """
    with start([Member("wire", "beside.WirePart", "worker")], Nodes()) as crew:
        return crew.all("wire", *gpus, timeout=LIMIT)[0]


class Other:
    """Another's way as a player, in a crew of its own.

    Attributes:
        way: its name.
        reason: why it can do no more, in one line; None: it can.
    """

    unit = 1

    def __init__(self, way: str, reason: str | None = None) -> None:
        self.way, self.reason = way, reason
        self._crew = Crew([])
        self._p50_us = 0.0  # of the last round

    def start(self, nodes: Nodes, room: int, cores: tuple[int, int] | None) -> None:
        """Starts the processes, and does not wait for them. `room`: bytes of the largest message;
        `cores`: those of others, to keep away from."""
        links = Pipe()
        # On the CPU the process may be a fork (see Peer.spawn), which sets them itself.
        from_the_start = {} if self.way in ways.ON_CPU else others.ENVIRONMENT
        with contextlib.suppress(GaveUpError), self._guarded():
            for role, link, own in zip(("worker", "server"), links, _apart(cores), strict=True):
                make = partial(_make, Side, self.way, link, room, own)
                member = Member(role, "beside.OtherPart", role, variables=from_the_start)
                self._crew.peers.append(Peer.spawn(member, Nodes(make, make)))
        for link in links:
            link.close()

    def join(self, gpus: tuple[int, int] | None) -> None:
        """Has them join, with tensors on these two or on the CPU, and does not wait for it."""
        with contextlib.suppress(GaveUpError), self._guarded():
            self._crew.results(START)
            for i, peer in enumerate(self._crew.peers):
                place = Place(peer.name, 0, 1, 1, "", {}, None, gpus and gpus[i])
                peer.tell("within", 2 * LIMIT + i * APART, "connect", [place])

    def joined(self) -> None:
        """Waits for it."""
        with contextlib.suppress(GaveUpError), self._guarded():
            self._crew.results(2 * LIMIT + 2)

    def prepare(self, out: int, back: int) -> None:
        """The bytes there and home of the next rounds."""
        with contextlib.suppress(GaveUpError):
            self._call("prepare", out, back)

    def check(self, seed: int) -> None:
        """A round trip that is compared."""
        self._call("verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        """As the side sees it that begins."""
        # Ten times what is to be expected, of an exchange that took as long as the last ones.
        more = 10 * (warmup + count) * self._p50_us / 1e6
        found: Figures = self._call("measure", warmup, count, more=more)
        self._p50_us = found["p50_us"]
        return found

    def leave(self) -> None:
        """Tells the processes to end, and does not wait for it."""
        for peer in self._crew.peers:
            with contextlib.suppress(OSError):
                peer.tell("end")

    def close(self, patience: float) -> None:
        """Ends the processes, which have so many seconds each to do it themselves."""
        peers, self._crew = self._crew.peers, Crew([])
        end_all(peers, patience)

    def _call(self, method: str, *args: Any, more: float = 0) -> Any:
        limit = LIMIT + more
        with self._guarded():
            for i, peer in enumerate(self._crew.peers):
                peer.tell("within", limit + i * APART, method, *args)
            return self._crew.results(limit + 2)[0]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ends the processes when something goes wrong, and keeps the reason.

        Raises:
            GaveUpError: something did, now or before.
        """
        if self.reason is None:
            try:
                yield
                return
            except (BenchError, OSError) as error:
                errors = [error, *_also(self._crew)]
                print(f"bench: {self.way}:", *errors, sep="\n", file=sys.stderr, flush=True)
                wrong = [one for one in errors if isinstance(one, WrongDataError)]
                told = "\n".join(map(str, wrong or errors[::-1]))
                self.reason = others.reason(BenchError(told))
                self.close(0)
        raise GaveUpError(f"{self.way}: {self.reason}")


def _make(
    make: Callable[..., Any], way: str, link: Any, room: int, cores: Any, place: Place
) -> Any:
    os.environ.update(others.ENVIRONMENT)
    return make(place, way, link, room, cores)


def _also(crew: Crew) -> list[Exception]:
    """What else is said in a crew that has failed: who fails first may only have waited."""
    end = time.monotonic() + 1
    found: list[Exception] = []
    for peer in crew.peers:
        if wait([peer.fileno()], max(0.0, end - time.monotonic())):
            try:
                peer.result()
            except (BenchError, OSError) as error:
                found.append(error)
    return found


def beside(
    stack: contextlib.ExitStack,
    names: Sequence[str],
    gpus: tuple[int, int] | None,
    room: int,
    cores: tuple[int, int] | None,
    nodes: Nodes,
) -> list[Other]:
    """A player for each of the names of WAYS; those that cannot play know why. They end with the
    stack.

    Args:
        gpus: of the two sides of ours; None: tensors are on the CPU.
        room: bytes of the largest message.
        cores: of the two sides of ours.
    """
    players = []
    for way in names:
        reason = None
        if gpus is None and way not in ways.ON_CPU:
            reason = "it takes tensors on GPUs"
        elif gpus and way not in ways.ON_GPUS:
            reason = "it takes tensors on the CPU"
        elif gpus and gpus[0] == gpus[1]:
            reason = "it takes two GPUs, and there is one"
        else:
            reason = ways.missing(way)
        players.append(Other(way, reason))
    able = [player for player in players if player.reason is None]
    stack.callback(_close, able)
    for player in able:
        player.start(nodes, room, cores)
    for player in able:
        player.join(gpus)
    for player in able:
        player.joined()
    return players


def _close(players: Sequence[Other]) -> None:
    for player in players:
        player.leave()
    for player in players:
        player.close(2)


def _apart(cores: tuple[int, int] | None) -> tuple[list[int], list[int]]:
    """Cores for two processes, others than those: a way may have threads that never sleep. None
    where there are not enough."""
    if cores is None:
        return [], []
    free = sorted(os.sched_getaffinity(0) - set(cores))
    if len(free) < 2 * CORES:
        return [], []
    return free[:CORES], free[CORES : 2 * CORES]
