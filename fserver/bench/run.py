"""One run of a benchmark: its table, its rows, and the raw baseline that takes turns."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import report
from .baseline import Baseline
from .crew import Case, Nodes
from .errors import BenchError
from .report import Figures
from .turns import Player, take_turns


@dataclass
class Raw:
    """A raw baseline that takes turns, or none.

    Attributes:
        says: its name, or why there is none, as a row has it.
        rounds: its figures beside those that were measured last.
    """

    player: Baseline | None = None
    says: dict[str, Any] = field(default_factory=dict)
    rounds: list[Figures] = field(default_factory=list)


class Run(contextlib.ExitStack):
    """What one command measures. Processes that are entered into it end with it.

    Attributes:
        options: as the parser gave them.
        nodes: who plays.
        cores: of workers and servers; None: processes are not pinned.
        rows: those that were added.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        nodes: Nodes = Nodes(),  # noqa: B008 (immutable)
        columns: Sequence[report.Column] = report.COLUMNS,
        steps: float = 0,
        pin: bool = True,
    ):
        """Checks that there is a GPU if one is asked for, and prints on what is measured.

        Args:
            name: of the benchmark.
            options, nodes: see the attributes.
            columns: of its table.
            steps: how often `step` will be called.
            pin: choose cores, if the options name none.

        Raises:
            BenchError: there is none.
        """
        super().__init__()
        self.options, self.nodes, self.rows = options, nodes, list[dict[str, Any]]()
        self._name, self._columns = name, columns
        self._raw = Raw()
        if getattr(options, "device", None) in ("gpu", ["gpu"]):
            need_gpu()
        self.cores = choose_cores(options.cores) if pin else options.cores
        self.facts = report.machine(self.cores)
        print(report.show_machine(self.facts), flush=True)
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = self.enter_context(_progress())
            self._task = self._bar.add_task(name, total=steps)

    def header(self) -> None:
        """Prints the titles of the table."""
        print(report.header(self._columns), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Prints a row and keeps it."""
        print(report.line(self._columns, row), flush=True)
        self.rows.append(row)

    def step(self, count: float = 1) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.advance(self._task, count)

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
        """Starts the raw baseline of a way, for `turns` and `row`. Without a compiler, or if the
        system refuses its calls, there is none, and the rows say why.

        Args:
            way: one of baseline.WAYS; None: there is none.
            where, make: see Baseline.
            stack: it ends with that, if not with the run.
        """
        self._raw = Raw()
        if self.options.no_baseline or way is None:
            missing = "--no-baseline" if way else "there is no raw program that does the same"
            self._raw.says["baseline_missing"] = missing
            return self._raw
        try:
            with contextlib.ExitStack() as own:
                raw = own.enter_context(make(way, self.cores, where))
                raw.prepare(8, 8)
                raw.measure(0, 1)
                (stack or self).enter_context(own.pop_all())
        except BenchError as error:
            print(f"bench: there is no baseline: {error}", file=sys.stderr)
            self._raw.says["baseline_missing"] = str(error)
        else:
            self._raw = Raw(raw, {"baseline": way})
        return self._raw

    def turns(
        self, players: Sequence[Player], out: int, back: int, raws: Sequence[Raw] | None = None
    ) -> list[list[Figures]]:
        """The figures of the players, each in all rounds, in turn with the baseline that was opened
        last, or with `raws`. These move so many bytes there and home."""
        options = self.options
        beside = [(raw, raw.player) for raw in raws or [self._raw] if raw.player]
        for _, player in beside:
            player.prepare(out, back)
        found = take_turns(
            [*(player for _, player in beside), *players],
            options.rounds,
            options.seconds,
            options.iters,
            done=self.step,
        )
        for raw, _ in beside:
            raw.rounds = found.pop(0)
        return found

    def row(
        self,
        transport: str,
        case: Case,
        measured: Sequence[Figures],
        raw: Raw | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """A row of what `turns` gave, beside the baseline that was opened last, or `raw`."""
        raw = raw or self._raw
        out, back = sum(case.out), sum(case.back)
        says = {**raw.says, **more}
        return report.row(transport, case.op, out, back, measured, raw.rounds, **says)


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the cores of workers and servers, or None if processes cannot be pinned."""
    if not hasattr(os, "sched_getaffinity"):
        print(
            "bench: this system cannot pin processes to cores, so the results will be noisy",
            file=sys.stderr,
        )
        return None
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
    import torch

    if not torch.cuda.is_available():
        raise BenchError("--device gpu: torch sees no GPU (run `fserver doctor` for the reason)")


def _progress() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        raise BenchError("rich is missing (run pip install 'fserver[bench]')") from None
    return Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
    )
