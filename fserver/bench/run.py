"""One run of a benchmark: its table, its rows, and the raw baseline that takes turns."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import report
from .baseline import Baseline
from .crew import Case, Nodes
from .errors import BenchError
from .report import Figures
from .turns import Player, take_turns


@dataclass
class Raw:
    """A raw baseline that takes turns, or none. `says` is its name, or why there is none, as a row
    has it; `rounds` are its figures beside those that were measured last."""

    player: Baseline | None = None
    says: dict[str, Any] = field(default_factory=dict)
    rounds: list[Figures] = field(default_factory=list)


class Run(contextlib.ExitStack):
    """What one command measures. Processes that are entered into it end with it.

    Attributes:
        options: as the parser gave them.
        nodes: who plays.
        cores: of workers and servers.
        rows: those that were added.
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

    def header(self) -> None:
        """Prints the titles of the table."""
        print(report.header(self._columns), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Prints a row and keeps it."""
        print(report.line(self._columns, row), flush=True)
        self.rows.append(row)

    def step(self) -> None:
        """One more is done."""
        self._bar.advance(self._task)

    def finish(self, **more: Any) -> None:
        """Writes the file that was asked for."""
        if self.options.json:
            results = {"bench": self._name, "rows": self.rows, **more, "machine": self.facts}
            report.save(self.options.json, results)

    def open_raw(
        self,
        way: str | None,
        where: str | None = None,
        make: Callable[..., Baseline] = Baseline,
        stack: contextlib.ExitStack | None = None,
    ) -> Raw:
        """Starts the raw baseline of a way, which ends with the stack or the run; `where` and
        `make` are of Baseline. Without a compiler, or if the system refuses its calls, there is
        none, and the rows say why."""
        if self.options.no_baseline or way is None:
            missing = "--no-baseline" if way else "there is no raw program that does the same"
            return Raw(says={"baseline_missing": missing})
        try:
            with contextlib.ExitStack() as own:
                raw = own.enter_context(make(way, self.cores, where))
                raw.prepare(8, 8)
                raw.measure(0, 1)
                (stack or self).enter_context(own.pop_all())
        except BenchError as error:
            print(f"bench: there is no baseline: {error}", file=sys.stderr)
            return Raw(says={"baseline_missing": str(error)})
        return Raw(raw, {"baseline": way})

    def turns(
        self, players: Sequence[Player], moved: tuple[int, int], raws: Sequence[Raw]
    ) -> list[list[Figures]]:
        """The figures of the players, each in all rounds, in turn with the baselines, which move so
        many bytes there and home."""
        options = self.options
        beside = [(raw, raw.player) for raw in raws if raw.player]
        for _, player in beside:
            player.prepare(*moved)
        all_players = [*(player for _, player in beside), *players]
        how = options.rounds, options.seconds, options.iters, self.step
        found = take_turns(all_players, *how)
        for raw, _ in beside:
            raw.rounds = found.pop(0)
        return found


def row(
    transport: str, case: Case, measured: Sequence[Figures], raw: Raw, **more: Any
) -> dict[str, Any]:
    """A row of what `turns` gave, beside a baseline."""
    moved = sum(case.out), sum(case.back)
    says = {**raw.says, **more}
    return report.row(transport, case.op, *moved, measured, raw.rounds, **says)


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
    if not torch.cuda.is_available():
        raise BenchError("--device gpu: torch sees no GPU (run `fserver doctor` for the reason)")
