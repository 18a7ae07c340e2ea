"""One run of a benchmark: its table, and the ways that are compared. They take turns, A B C, C B A,
so that what else the machine does hits all of them."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import report
from .baseline import Baseline, baseline_of, program
from .crew import Case, Crew
from .errors import BenchError
from .options import exchanges
from .report import Figures


class CrewPlayer:
    """Workers and servers of a crew. All players have these methods and `unit`, the number of
    exchanges that `measure` counts as one."""

    def __init__(self, crew: Crew, shared: bool = False):
        self.crew, self.shared, self.unit = crew, shared, 1
        self._p50_us = 0.0  # of the last round

    def prepare(self, case: Case) -> None:
        """The case of the next rounds."""
        self.unit = case.unit
        self.crew.all("prepare", dataclasses.replace(case, shared=self.shared))

    def check(self, seed: int) -> None:
        """Outside of the timed part: exchanges that are compared byte by byte."""
        self.crew.all("verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        """One round; p50_us is of a single exchange, of the slowest process with workers."""
        # More time by ten times what is to be expected, if exchanges take as long as the last ones.
        limit = self.crew.limit + 1e-5 * (warmup + count) * self.unit * self._p50_us
        results = self.crew.workers("measure", warmup, count, limit=limit)
        nobody = {"p50_us": 0.0}  # of two hosts, that of the server
        found: Figures = max(results, key=lambda figures: figures["p50_us"], default=nobody)
        self._p50_us = found["p50_us"]
        return found


@dataclasses.dataclass
class Way:
    """One of what is compared: its player, or the reason why there is none; the raw way that it is
    compared with; and what was measured last. Where a `spare` one fails, the others go on."""

    name: str
    player: Any = None
    raw: "Way | None" = None
    reason: str | None = None
    spare: bool = False
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


def take_turns(
    ways: Sequence[Way],
    rounds: int,
    seconds: float,
    iters: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Measures all ways that have a player, in turn. A round of one takes about so many seconds, or
    has `iters` exchanges, in the largest unit of the players. `done` is called after each round of
    all."""
    ways = [way for way in ways if way.player]
    largest = max((way.player.unit for way in ways), default=1)
    counts = {}
    for way in ways:
        way.rounds = []
        with way.tried():
            unit = way.player.unit
            way.player.check(0)
            counts[id(way)] = (iters or 0) * largest // unit
            if iters is None:
                trial = max(10 // unit, 1)
                p50 = way.player.measure(1, trial)["p50_us"]
                counts[id(way)] = min(max(int(seconds * 1e6 / p50 / unit), trial), 100_000)
    for turn in range(rounds):
        for way in ways[:: -1 if turn % 2 else 1]:
            with way.tried():
                if way.player:
                    count = counts[id(way)]
                    figures = way.player.measure(min(max(count // 10, 1), 500), count)
                    way.player.check(turn + 1)
                    way.rounds.append(figures)
        done()


class Run(contextlib.ExitStack):
    """What one command measures. Processes that are entered into it end with it.

    `options` are as the parser gave them, `cores` those of workers and servers, and `rows` those
    of the table.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        columns: Sequence[str],
        steps: float = 0,
    ):
        """Checks that there is a GPU if one is asked for, and prints on what is measured. `step`
        will be called so often."""
        from rich.console import Console
        from rich.progress import Progress

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
        bar = Progress(
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=not sys.stderr.isatty(),
        )
        self._bar = self.enter_context(bar)
        self._task = self._bar.add_task(name, total=steps)

    def table(self, rows: Iterable[dict[str, Any]]) -> None:
        """Prints a table, row by row, and writes the file that was asked for."""
        print(report.header(self._columns), flush=True)
        for row in rows:
            print(report.line(self._columns, row), flush=True)
            self.rows.append(row)
        if self.options.json:
            about = {"machine": self.facts, "options": vars(self.options)}
            report.save(self.options.json, {"bench": self._name, "rows": self.rows, **about})

    def step(self) -> None:
        self._bar.advance(self._task)

    def way(self, name: str, make: Callable[[], Baseline], raw: Way | None = None) -> Way:
        """The way of a program that `make` starts, until the run ends; without a compiler, or if
        the system refuses its calls, why there is none."""
        way = Way(name, None, raw, spare=True)
        with way.tried():
            player = self.enter_context(make())
            player.prepare(Case("", (8,), (8,)))
            player.measure(0, 1)
            way.player, way.spare = player, False
        return way

    def raw(self, transport: str, gpus: tuple[int, int] = (0, 0)) -> Way:
        """The raw baseline of a transport, which is started once."""
        name = "" if self._role else baseline_of(transport)  # it has both ends on one host
        if self.options.no_baseline or not name:
            missing = "--no-baseline" if name else "there is no raw program that does the same"
            return Way("", reason=missing)
        if name not in self._raws:
            self._raws[name] = self.way(name, lambda: program(name, self.cores, gpus))
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
        take_turns(playing, how.rounds, how.seconds, iters, self.step)


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int]:
    """The cores of workers and servers: those that are asked for, or the first two."""
    usable = sorted(os.sched_getaffinity(0))
    asked = asked or (usable[0], usable[min(1, len(usable) - 1)])
    for core in asked:
        if core not in usable:
            raise BenchError(f"--cores: core {core}: want one of {', '.join(map(str, usable))}")
    if asked[0] == asked[1]:
        print(
            f"bench: both processes share core {asked[0]}, so the times are those of the kernel's "
            "scheduler, not of a transport (give two cores with --cores)",
            file=sys.stderr,
        )
    return asked


def need_gpu() -> None:
    """Raises BenchError if there is no GPU."""
    import torch  # takes seconds

    if not torch.cuda.is_available():
        raise BenchError("--device gpu: torch sees no GPU (run `fserver doctor` for the reason)")
