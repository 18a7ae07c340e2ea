"""One engine for all comparisons: those that are compared take turns, A B C, C B A, so that what
else the machine does hits all of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import report
from .crew import Case, Crew
from .errors import GaveUpError
from .report import Figures


class CrewPlayer:
    """Workers and servers of fserver. All players have these methods and `unit`, the number of
    exchanges that `measure` counts as one."""

    def __init__(self, crew: Crew, shared: bool = False):
        self.crew, self.shared, self.unit = crew, shared, 1

    def prepare(self, case: Case) -> None:
        """The case of the next rounds. Other players are given the bytes there and home."""
        self.unit = case.unit
        self.crew.all("prepare", dataclasses.replace(case, shared=self.shared))

    def check(self, seed: int) -> None:
        """Outside of the timed part: exchanges that are compared byte by byte."""
        self.crew.all("verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        """One round; p50_us is of a single exchange, of the slowest process with workers."""
        results = self.crew.workers("measure", warmup, count)
        return max(results, key=lambda figures: figures["p50_us"])


class FreshPlayer(CrewPlayer):
    """The same, with new nodes, connections and tensors in each round: where memory lies can change
    a round trip by more than what is looked for. `how` is of Crew.cluster."""

    def __init__(self, crew: Crew, *how: Any, **more: Any):
        super().__init__(crew)
        self._connected = functools.partial(crew.cluster, *how, **more)

    def prepare(self, case: Case) -> None:
        self.case = case

    def check(self, seed: int) -> None:
        """Nothing: each round does it."""

    def measure(self, warmup: int, count: int) -> Figures:
        with self._connected():
            return self.round(warmup, count)

    def round(self, warmup: int, count: int) -> Figures:
        """What is done with the new nodes; adds the transport."""
        super().prepare(self.case)
        super().check(0)
        found = super().measure(warmup, count)
        super().check(1)
        return {**found, "transport": self.crew.transport()}


@dataclasses.dataclass
class Way:
    """One of what is compared: its player, or the reason why there is none; the raw way that it is
    compared with; and what was measured last."""

    name: str
    player: Any = None
    raw: "Way | None" = None
    reason: str | None = None
    rounds: list[Figures] = dataclasses.field(default_factory=list)

    def row(self, case: Case) -> dict[str, Any]:
        raw, moved = self.raw or Way(""), (sum(case.out), sum(case.back))
        return {
            **report.row(self.name, case.op, *moved, self.rounds, raw.rounds),
            "baseline": raw.name if raw.player else None,
            "baseline_missing": raw.reason,
            "skipped": self.reason or getattr(self.player, "reason", None),
        }


def take_turns(
    players: Sequence[Any],
    rounds: int,
    seconds: float,
    iters: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[list[Figures]]:
    """Measures all players in turn; gives the figures of each one's rounds: none of one that raised
    GaveUpError. A round of one player takes about so many seconds, or has `iters` exchanges, in the
    largest unit of the players. `done` is called after each round of all."""
    largest = max((player.unit for player in players), default=1)
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
        for i, count in sorted(counts.items(), reverse=turn % 2 == 1):
            try:
                figures = players[i].measure(min(max(count // 10, 1), 500), count)
                players[i].check(turn + 1)
                results[i].append(figures)
            except GaveUpError:
                del counts[i]
                results[i].clear()
        done()
    return results
