"""This build and that of another checkout, in turn: `fserver bench pingpong --against DIR`.

Each build has processes that import its package, with this checkout's `fserver.bench` in it, which
uses no more of a package fserver than its public API.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fserver import _loader

from . import report
from .crew import Case, Crew, pair_of, start
from .run import Run
from .turns import FreshPlayer, Way

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
    commit = report.commit(root / "fserver")
    return f"{root} ({commit})" if commit else str(root)


def way(run: Run, stack: contextlib.ExitStack, transport: str, device: str) -> Way:
    """This build, and as its raw way the other one: a pair of processes of each on the same cores,
    which end with the stack."""
    theirs, ours = (
        Way(name(root), FreshPlayer(_start(stack, root, run), transport, device=device))
        for root in (run.options.against, HERE)
    )
    ours.raw = theirs
    return ours


def row(way: Way, case: Case) -> dict[str, Any]:
    """The row of this build, in which "baseline_" is of the other one. "ratio" is the median of the
    ratios of the rounds; "ratio_low" and "ratio_high" are its 95 % interval."""
    theirs = way.raw.rounds if way.raw else []
    both = list(zip(way.rounds, theirs, strict=True))
    ratios = [mine["p50_us"] / its["p50_us"] for mine, its in both]
    low, high = report.median_interval(ratios)
    return {
        **way.row(case),
        "transport": "/".join(dict.fromkeys(one["transport"] for pair in both for one in pair)),
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
