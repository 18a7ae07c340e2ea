"""Other libraries as players beside ours: each has two processes of its own, on the same two GPUs
or on the CPU."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .actors import POISON, number, own_seed
from .crew import Nodes
from .errors import BenchError, GaveUpError
from .libraries import ENVIRONMENT, missing, pair
from .options import ON_CPU, ON_GPUS
from .report import Figures, figures
from .team import SideActor, Team

LIMIT = 20.0  # seconds; what is done in one go, the first of which takes longest; to join: twice
CORES = 4  # of each process


class RivalActor(SideActor):
    """One of two processes, in which the host waits for its stream at each round trip, as
    push_pull and wait do."""

    def join(self, way: str, room: int, gpus: tuple[int, int] | None) -> None:
        """Joins the other. `room`: bytes of the largest message."""
        if gpus:
            self.use(gpus[self.index])
            torch.cuda.set_stream(torch.cuda.Stream())
        self.open = pair(way, self, room)

    def prepare(self, out: int, back: int) -> None:
        """Opens the way for so many bytes there and home."""
        self.way = self.open(*((back, out) if self.index else (out, back)))

    def trip(self) -> None:
        """One round trip; the first side's is over when the answer is there."""
        calls = self.way.send, self.way.recv
        for call in calls[::-1] if self.index else calls:
            call()
        self.settle()

    def verify(self, seed: int) -> None:
        """A round trip of new data into poisoned memory, compared byte by byte."""
        way, seeds = self.way, [own_seed(seed, role, 0, 0) for role in ("worker", "server")]
        self.pattern.fill(way.source, seeds[self.index])
        number(way.source).value = seed
        way.landing.fill_(POISON)
        self.settle()
        self.barrier()
        self.trip()
        self.pattern.check(way.landing, seeds[1 - self.index], seed, "what came")
        self.barrier()

    def measure(self, warmup: int, count: int) -> Figures:
        """Times `count` round trips on the side that begins."""
        for _ in range(warmup):
            self.trip()
        now, samples = time.perf_counter_ns, []
        for _ in range(count):
            start = now()
            self.trip()
            samples.append(now() - start)
        return figures(samples)


class Rival:
    """A library as a player, with two processes of its own on these GPUs or on the CPU, which begin
    to start. When something goes wrong with it, it is out; `reason` says why in one line."""

    unit = 1

    def __init__(
        self,
        way: str,
        gpus: tuple[int, int] | None,
        cores: tuple[int, int] | None,
        nodes: Nodes,
    ):
        self.way, self.gpus, self.reason = way, gpus, _unable(way, gpus)
        self._p50_us = 0.0  # of the last round
        with contextlib.suppress(GaveUpError), self._guarded():
            variables = ENVIRONMENT if gpus else {}
            self.team = Team(RivalActor, (1, 1), (), _apart(cores), variables, nodes)

    def join(self, room: int) -> None:
        with contextlib.suppress(GaveUpError), self._guarded():
            self.team.results()
            self.team.call(2 * LIMIT, "join", self.way, room, self.gpus)

    def prepare(self, out: int, back: int) -> None:
        with contextlib.suppress(GaveUpError), self._guarded():
            self.team.call(LIMIT, "prepare", out, back)

    def check(self, seed: int) -> None:
        with self._guarded():
            self.team.call(LIMIT, "verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        with self._guarded():
            # Ten times what is to be expected, of an exchange that took as long as the last ones.
            more = 10 * (warmup + count) * self._p50_us / 1e6
            found: Figures = self.team.call(LIMIT + more, "measure", warmup, count)[0]
        self._p50_us = found["p50_us"]
        return found

    def close(self) -> None:
        if hasattr(self, "team"):
            self.team.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keeps the reason when something goes wrong. Raises GaveUpError then, and ever after."""
        if self.reason is None:
            try:
                yield
                return
            except (BenchError, OSError) as error:
                print(f"bench: {self.way}:\n{error}", file=sys.stderr, flush=True)
                self.reason = reason(error)
        raise GaveUpError(f"{self.way}: {self.reason}")


def beside(
    stack: contextlib.ExitStack,
    names: Sequence[str],
    gpus: tuple[int, int] | None,
    room: int,
    cores: tuple[int, int] | None,
    nodes: Nodes,
) -> list[Rival]:
    """A player for each of the names; those that cannot play know why. They end with the
    stack. `gpus` and `cores` are of the two sides of ours, and `room` is the bytes of the largest
    message."""
    players = []
    for way in names:
        players.append(Rival(way, gpus, cores, nodes))
        stack.callback(players[-1].close)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda player: player.join(room), players))
    return players


def _unable(way: str, gpus: tuple[int, int] | None) -> str | None:
    """Why a library cannot play, if it is known before it is tried."""
    if way not in (ON_GPUS if gpus else ON_CPU):
        return f"it takes tensors on {'the CPU' if gpus else 'GPUs'}"
    if gpus and gpus[0] == gpus[1]:
        return "it takes two GPUs, and there is one"
    return missing(way)


def _apart(cores: tuple[int, int] | None) -> tuple[Sequence[int], ...]:
    """Cores for two processes, others than those: a library may have threads that never sleep.
    None where there are not enough."""
    free = sorted(os.sched_getaffinity(0) - set(cores)) if cores else []
    return (free[:CORES], free[CORES : 2 * CORES]) if len(free) >= 2 * CORES else ((), ())


def reason(error: BaseException) -> str:
    """The line that says most of what the sides reported: the cause, not that another is gone."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|.* ended with ", line)]
    gone = "EOFError|Pipe|does not answer|by peer"
    first = [line for line in named if not re.search(gone, line)]
    if named and not first:
        return f"{named[0]}: it crashed, or hung and was ended; standard error says where"
    return (first or lines[-1:])[0][:300]
