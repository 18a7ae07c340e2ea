"""Other libraries as players beside ours: each has two processes of its own, on the same two GPUs
or on the CPU."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import torch

from .baseline import SMALL
from .crew import Case
from .errors import WrongDataError
from .graph.traffic import Traffic, theirs
from .libraries import ENVIRONMENT, join, missing
from .options import ON_CPU, ON_GPUS
from .report import Figures, figures
from .run import CrewPlayer, Way
from .team import Side, Team

LIMIT = 60.0  # seconds; what is done in one go, the first of which takes longest
CORES = 4  # of each process


class RivalSide(Side):
    """One of two processes, in which the host waits for its stream at each round trip, as
    push_pull and wait do."""

    def join(self, by: str, room: int) -> None:
        """Joins the other. `room`: bytes of the largest message."""
        self.library = join(by, self, 2 * room)

    def prepare(self, case: Case) -> None:
        """Opens the way for the bytes of a case; a push is answered too."""
        self.traffic = Traffic(self, theirs(self, [(case.moved[0], case.moved[1] or SMALL)]), 1)

    def verify(self, seed: int) -> None:
        """A round trip of new data into poisoned memory, compared byte by byte."""
        if wrong := self.traffic.checked():
            raise WrongDataError(f"{wrong} bytes of what came")

    def trip(self) -> None:
        """One round trip; a worker's is over when the answer is there."""
        self.traffic.body()
        self.settle()

    def measure(self, warmup: int, count: int) -> Figures:
        """Times `count` round trips."""
        now, samples = time.perf_counter_ns, []
        with torch.cuda.stream(self.traffic.main):
            for _ in range(warmup + count):
                start = now()
                self.trip()
                samples.append(now() - start)
        return figures(samples[warmup:])


def beside(
    stack: contextlib.ExitStack,
    names: Sequence[str],
    raw: Way | None,
    gpus: tuple[int, int] | None,
    room: int,
    cores: tuple[int, int] | None,
) -> Iterator[Way]:
    """A way for each of the names; those that cannot be had know why. Their processes end with the
    stack. `gpus` and `cores` are of the two sides of ours, and `room` is the bytes of the largest
    message."""
    for name in names:
        way = Way(name, None, raw, _unable(name, gpus), spare=True)
        if not way.reason:
            with way.tried():
                variables = ENVIRONMENT if gpus else {}
                team = Team((1, 1), gpus, _apart(cores), RivalSide, variables, LIMIT)
                stack.enter_context(team).all("join", name, room)
                way.player = CrewPlayer(team)
        yield way


def _unable(way: str, gpus: tuple[int, int] | None) -> str | None:
    """Why a library cannot play, if it is known before it is tried."""
    if way not in (ON_GPUS if gpus else ON_CPU):
        return f"it takes tensors on {'the CPU' if gpus else 'GPUs'}"
    if gpus and gpus[0] == gpus[1]:
        return "it takes two GPUs, and there is one"
    return missing(way)


def _apart(cores: tuple[int, int] | None) -> Sequence[Sequence[int]] | None:
    """Cores for two processes, others than those: a library may have threads that never sleep.
    None where there are not enough."""
    free = sorted(os.sched_getaffinity(0) - set(cores)) if cores else []
    return (free[:CORES], free[CORES : 2 * CORES]) if len(free) >= 2 * CORES else None
