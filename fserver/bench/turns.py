"""One engine for all comparisons: those that are compared take turns, A B C A B C, so that what
else the machine does hits all of them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from .crew import Case, Crew
from .errors import GaveUpError
from .report import Figures


class Player(Protocol):
    """One way to move bytes. Its case has been prepared."""

    unit: int  # exchanges that `measure` counts as one

    def check(self, seed: int) -> None:
        """Outside of the timed part: exchanges that are compared byte by byte."""

    def measure(self, warmup: int, count: int) -> Figures:
        """One round of `count` times `unit` timed exchanges; p50_us is of a single one."""


class CrewPlayer:
    """Workers and servers of fserver."""

    def __init__(self, crew: Crew):
        self.crew, self.unit = crew, 1

    def prepare(self, case: Case) -> None:
        """The case of the next rounds."""
        self.unit = case.unit
        self.crew.all("prepare", case)

    def check(self, seed: int) -> None:
        self.crew.all("verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        """Of the slowest process, if several hold workers."""
        results = self.crew.workers("measure", warmup, count)
        return max(results, key=lambda figures: figures["p50_us"])


def take_turns(
    players: Sequence[Player],
    rounds: int,
    seconds: float,
    iters: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[list[Figures]]:
    """Measures all players in turn; gives the figures of each one's rounds: none of one that raised
    GaveUpError. A round of one player takes about so many seconds, or has `iters` exchanges, in the
    largest unit of the players. `done` is called after each round of all."""
    largest = max(player.unit for player in players)
    counts: dict[int, int] = {}  # of those that have not given up
    results: list[list[Figures]] = [[] for _ in players]
    for i, player in enumerate(players):
        with contextlib.suppress(GaveUpError):
            player.check(0)
            if iters is None:
                trial = max(10 // player.unit, 1)
                p50 = player.measure(1, trial)["p50_us"]
                counts[i] = min(max(int(seconds * 1e6 / p50 / player.unit), trial), 100_000)
            else:
                counts[i] = iters * largest // player.unit
    for turn in range(rounds):
        for i, count in list(counts.items()):
            try:
                figures = players[i].measure(min(max(count // 10, 1), 500), count)
                players[i].check(turn + 1)
                results[i].append(figures)
            except GaveUpError:
                del counts[i]
                results[i].clear()
        done()
    return results
