"""One run of a benchmark: its table, its rows, and the raw baselines that take turns."""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import report
from .baseline import Baseline, baseline_of, program
from .crew import Case, Crew, Nodes
from .errors import BenchError
from .turns import CrewPlayer, Way, take_turns

SMALL = 64  # bytes that answer a push of a program or a library


class Run(contextlib.ExitStack):
    """What one command measures. Processes that are entered into it end with it.

    `options` are as the parser gave them, `cores` those of workers and servers, and `rows` those
    of the table.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        nodes: Nodes = Nodes(),  # noqa: B008 (immutable)
        columns: Sequence[report.Column] = report.COLUMNS,
        steps: float = 0,
    ):
        """Checks that there is a GPU if one is asked for, and prints on what is measured. `step`
        will be called so often."""
        from rich.console import Console
        from rich.progress import Progress

        super().__init__()
        self.options, self.nodes, self.rows = options, nodes, list[dict[str, Any]]()
        self._name, self._columns = name, columns
        self._raws: dict[tuple[str, str | None], Way] = {}
        if getattr(options, "device", None) == ["gpu"]:
            need_gpu()
        self.cores = choose_cores(options.cores)
        self.facts = report.machine(self.cores)
        print(report.show_machine(self.facts), flush=True)
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
        try:
            with contextlib.ExitStack() as own:
                player = own.enter_context(make())
                player.prepare(8, 8)
                player.measure(0, 1)
                self.enter_context(own.pop_all())
                return Way(name, player, raw)
        except BenchError as error:
            print(f"bench: {name}: {error}", file=sys.stderr)
            return Way(name, reason=str(error).splitlines()[0])

    def raw(self, transport: str, where: str | None = None) -> Way:
        """The raw baseline of a transport, which is started once. `where` is of `program`."""
        far = getattr(self.options, "role", None)  # a raw program has both ends on one host
        name = "" if far else baseline_of(transport)
        if self.options.no_baseline or not name:
            missing = "--no-baseline" if name else "there is no raw program that does the same"
            return Way("", reason=missing)
        if (name, where) not in self._raws:
            made = functools.partial(program, name, self.cores, where)
            self._raws[name, where] = self.way(name, made)
        return self._raws[name, where]

    def ours(self, crew: Crew) -> Way:
        """The way of nodes that are connected."""
        transport = crew.transport()
        return Way(transport, CrewPlayer(crew), self.raw(transport))

    def measure(self, ways: Sequence[Way], case: Case, whole: Case | None = None) -> None:
        """Measures a case in all ways, in turn with their baselines. What is not fserver moves the
        bytes of `whole`, if they are others; its pushes need an answer too."""
        moved = sum((whole or case).out), sum((whole or case).back) or SMALL
        both = [way for way in (*(way.raw for way in ways), *ways) if way and way.player]
        playing = list({id(way): way for way in both}.values())
        for way in playing:
            is_ours = isinstance(way.player, CrewPlayer)
            way.player.prepare(*([case] if is_ours else moved))
        how = self.options
        players = [way.player for way in playing]
        found = take_turns(players, how.rounds, how.seconds, how.iters, self.step)
        for way, rounds in zip(playing, found, strict=True):
            way.rounds = rounds


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
