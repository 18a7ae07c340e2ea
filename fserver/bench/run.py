"""One run of a benchmark: its table, and the ways that are compared. They take turns, A B C, C B A,
so that what else the machine does hits all of them."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from . import report
from .baseline import OF_TRANSPORT, Baseline
from .crew import Case
from .errors import BenchError
from .options import exchanges
from .report import Figures


@dataclasses.dataclass
class Way:
    """One of what is compared: its player, or the reason why there is none; the raw way that it is
    compared with; and what was measured last. Where a `spare` one fails, the others go on."""

    name: str
    player: Any = None  # a Crew or a Baseline
    raw: "Way | None" = None
    reason: str | None = None
    spare: bool = False
    count: int = 0  # of what a round measures
    rounds: list[Figures] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Ends the way if it is spare and something goes wrong with it."""
        try:
            yield
        except (BenchError, OSError) as error:
            if not self.spare:
                raise
            print(f"bench: {self.name}: {error}", file=sys.stderr, flush=True)
            self.player, self.rounds = None, []
            self.reason = getattr(error, "reason", str(error))

    def row(self, case: Case, groups: int = 1) -> dict[str, Any]:
        raw = self.raw or Way("")
        return {
            **report.row(self.name, case.op, case.moved, self.rounds, raw.rounds, groups),
            "baseline": raw.name if raw.player else None,
            "baseline_missing": raw.reason,
            "skipped": self.reason,
        }


def take_turns(ways: Sequence[Way], rounds: int, seconds: float, iters: int | None = None) -> None:
    """Measures all ways that have a player, in turn. A round of one takes about so many seconds, or
    has `iters` exchanges, in the largest unit of the players."""
    ways = [way for way in ways if way.player]
    largest = max((way.player.unit for way in ways), default=1)
    for way in ways:
        way.rounds = []
        with way.tried():
            unit = way.player.unit
            way.player.check(0)
            way.count = (iters or 0) * largest // unit
            if iters is None:
                trial = max(10 // unit, 1)
                p50 = way.player.measure(1, trial)["p50_us"]
                way.count = min(max(int(seconds * 1e6 / p50 / unit), trial), 100_000)
    for turn in range(rounds):
        for way in ways[:: -1 if turn % 2 else 1]:
            with way.tried():
                if way.player:
                    warmup = min(max(way.count // 10, 1), 500)
                    way.rounds.append(way.player.measure(warmup, way.count))
                    way.player.check(turn + 1)


class Run(contextlib.ExitStack):
    """What one command measures, with its options, the cores of workers and servers, and the rows
    of its table. Processes that are entered into it end with it."""

    def __init__(self, name: str, options: argparse.Namespace, columns: Sequence[str]):
        """Checks that there is a GPU if one is asked for, and prints on what is measured."""
        super().__init__()
        self.options, self.rows = options, list[dict[str, Any]]()
        self._name, self._columns = name, columns
        self._role = getattr(options, "role", None)  # of two hosts, which do the same
        self._raws: dict[str, Way] = {}
        if getattr(options, "device", None) == ["gpu"]:
            need_gpu()
        self.cores = choose_cores(options.cores)
        self.facts = report.machine(self.cores)
        text = "{cpu}, {cores} cores (pinned to {pinned}), {kernel}, python {python}, {versions}"
        print(text.format(**self.facts), flush=True)

    def table(self, cases: Iterable[Sequence[dict[str, Any]]], count: int) -> None:
        """Prints the rows of each of `count` cases as they come, then writes the file of --json."""
        from rich.console import Console
        from rich.progress import track

        hidden = not (sys.stdout.isatty() and sys.stderr.isatty())
        bar: dict[str, Any] = {"console": Console(stderr=True), "transient": True}
        table = report.Table(self._columns)
        for rows in track(cases, self._name, count, disable=hidden, **bar):
            table.add(*rows)
            self.rows += rows
        if self.options.json:
            about = {"machine": self.facts, "options": vars(self.options)}
            report.save(self.options.json, {"bench": self._name, "rows": self.rows, **about})

    def program(self, way: Way, kind: str, gpus: tuple[int, int] = (0, 0), **variables: str) -> Way:
        """Makes a program the player of a way until the run ends, or notes why it cannot run."""
        way.spare = True
        with way.tried():
            player = self.enter_context(Baseline(kind, self.cores, gpus, **variables))
            player.prepare(Case("", (8,), (8,)))
            player.measure(0, 1)
            way.player, way.spare = player, False
        return way

    def raw(self, transport: str, gpus: tuple[int, int] = (0, 0)) -> Way:
        """The raw baseline of a transport, which is started once."""
        # "cma/staged" has that of "cma". A program has both ends on one host.
        name = None if self._role else OF_TRANSPORT.get(transport.partition("/")[0])
        if self.options.no_baseline or not name:
            missing = "--no-baseline" if name else "there is no raw program that does the same"
            return Way("", reason=missing)
        if name not in self._raws:
            self._raws[name] = self.program(Way(name), name, gpus)
        return self._raws[name]

    def measure(self, ways: Sequence[Way], case: Case) -> None:
        """Measures a case in all ways, in turn with their baselines."""
        both = [way for way in (*(way.raw for way in ways), *ways) if way and way.player]
        playing = list({id(way): way for way in both}.values())
        for way in playing:
            with way.tried():
                way.player.prepare(case)
        how = self.options
        iters = exchanges(how, case.unit * sum(case.moved)) if self._role else how.iters
        take_turns(playing, how.rounds, how.seconds, iters)


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int]:
    """The cores of workers and servers: those that are asked for, or the first two."""
    usable = sorted(os.sched_getaffinity(0))
    asked = asked or (usable[0], usable[min(1, len(usable) - 1)])
    for core in asked:
        if core not in usable:
            raise BenchError(f"--cores: core {core}: want one of {', '.join(map(str, usable))}")
    if asked[0] == asked[1]:
        text = f"both processes share core {asked[0]}: the times are those of the scheduler"
        print(f"bench: {text} (give two cores with --cores)", file=sys.stderr)
    return asked


def need_gpu() -> None:
    import torch  # takes seconds

    if not torch.cuda.is_available():
        raise BenchError("--device gpu: torch sees no GPU (run `fserver doctor` for the reason)")
