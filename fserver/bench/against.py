"""This build and that of another checkout, in turn: `fserver bench pingpong --against DIR`.

Each build has processes that import its package, with this checkout's `fserver.bench` in it, which
uses no more of a package fserver than its public API.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fserver import _loader

from . import report
from .crew import Case, Crew, pair_of, start
from .report import Figures
from .run import Run
from .turns import CrewPlayer, take_turns

ROUNDS = 20
LIMIT = 1.03  # a ratio that is surely above means slower
HERE = Path(__file__).resolve().parents[2]
COLUMNS = (
    report.TRANSPORT,
    report.OP,
    *report.MOVED,
    *report.TIMES,
    report.number("its p50", 11, "baseline_p50_us"),
    report.number("ratio", 6, "ratio", 3),
    report.number("95 % from", 9, "ratio_low", 3),
    report.number("to", 6, "ratio_high", 3),
)


def checkout(text: str) -> Path:
    """The folder of --against. Raises LoadError if it has no package fserver that is built."""
    _loader.check(Path(text).resolve() / "fserver")
    return Path(text).resolve()


def name(root: Path) -> str:
    """A checkout, for people: its folder, and its commit if it has one."""
    commit = report.commit(root)
    return f"{root} ({commit})" if commit else str(root)


def rows(run: Run, transport: str, planned: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measures the cases with a pair of processes of each build on the same cores.

    Each round has new nodes, connections and tensors, because where memory lies can change a round
    trip by more than what is looked for. In a round the builds take turns case by case, and the
    build that is first changes with the round.

    In a row, "baseline_" is of the other build. "ratio" is the median of the ratios of the rounds,
    of this build's p50 to the other's; "ratio_low" and "ratio_high" are its 95 % interval.
    """
    options = run.options
    found: dict[int, list[list[Figures]]] = {case.key: [[], []] for case in planned}
    ways: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        crews = [_start(stack, root, run) for root in (HERE, options.against)]
        for turn in range(options.rounds):
            order = 1 if turn % 2 == 0 else -1
            with contextlib.ExitStack() as clusters:
                for crew in crews[::order]:
                    clusters.enter_context(crew.cluster(transport, device=planned[0].device))
                players = [CrewPlayer(crew) for crew in crews[::order]]
                for case in planned:
                    for player in players:
                        player.prepare(case)
                    figures = take_turns(players, 1, options.seconds, options.iters, run.step)
                    for mine, (one,) in zip(found[case.key], figures[::order], strict=True):
                        mine.append(one)
                ways.update((crew.transport(), None) for crew in crews)
    for case in planned:
        ours, theirs = found[case.key]
        ratios = [a["p50_us"] / b["p50_us"] for a, b in zip(ours, theirs, strict=True)]
        low, high = report.median_interval(ratios)
        moved = sum(case.out), sum(case.back)
        yield {
            **report.row("/".join(ways), case.op, *moved, ours, theirs),
            "baseline": name(options.against),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_low": round(low, 4),
            "ratio_high": round(high, 4),
        }


def _start(stack: contextlib.ExitStack, root: Path, run: Run) -> Crew:
    """The processes of one build, with a package of the checkout and of this benchmark."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fserver-bench-")))
    made = folder / "fserver"
    made.mkdir()
    for entry in (root / "fserver").iterdir():
        if entry.name not in ("bench", "__pycache__"):
            (made / entry.name).symlink_to(entry)
    (made / "bench").symlink_to(Path(__file__).resolve().parent)
    return stack.enter_context(start(pair_of(run.cores, path=folder), run.nodes))


def judge(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> int:
    """The exit status: 1 if this build is slower, which is said on standard error."""
    slower = [row for row in rows if row["ratio_low"] > LIMIT]
    for row in slower:
        text = "{transport}, {op}, {bytes_out} B out, {bytes_back} B back: {ratio:.3f} times"
        print(f"bench: slower than {options.against}: {text.format(**row)}", file=sys.stderr)
    return 1 if slower else 0
