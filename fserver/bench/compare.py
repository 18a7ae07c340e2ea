"""`fserver bench compare`: pingpong with several settings, or by two builds, in turn.

Each round starts the benchmark anew: where memory lies can change a round trip by more than what is
looked for. Each build has this checkout's `fserver.bench`, which uses its public API alone.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from fserver import _loader, versions
from fserver.command import command

from . import report
from .errors import BenchError
from .options import parser, positive

LIMIT = 1.03  # a ratio that is surely above means slower
LEAST = 6  # rounds; fewer give no interval of 95 %
TIMEOUT = 1800.0  # seconds; a round of a way
OURS = ("bench", "percentiles.py")  # of the package, whatever the build
HERE = Path(__file__).resolve().parents[2]
COLUMNS = (*report.MEASURED, "ratio", "ratio_low", "ratio_high", "shares", "way")
Rows = list[dict[str, Any]]


def checkout(text: str) -> Path:
    """The folder of --against. Raises LoadError if it has no package fserver that is built."""
    _loader.check(Path(text).resolve() / "fserver")
    return Path(text).resolve()


def settings(text: str) -> dict[str, dict[str, str]]:
    """The settings of several ways, by their texts: "A=1; A=2 B=3"."""
    try:
        return {way.strip(): dict(w.split("=", 1) for w in way.split()) for way in text.split(";")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: want NAME=VALUE ...; NAME=VALUE ...") from None


PARSER = parser(
    "fserver bench compare",
    "Runs a benchmark with several settings or by two builds in turn, anew in each round. The rows "
    "are medians over the rounds. The ratios, of p50, are to the first way, with their 95 % "
    "intervals. docs/benchmarks.md has examples.",
    ("--rounds", positive, 20, "number of rounds, 6 or more for an interval"),
    ("--against", checkout, None, "another checkout that is built: status 1 if slower"),
    ("--set", settings, None, 'environment of the ways, as in "A=1; A=2 B=3"'),
)
PARSER.add_argument("benchmark", choices=("pingpong", "af"))
PARSER.add_argument("args", nargs=argparse.REMAINDER, help="the options of the benchmark")


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status, 1 if this build is slower."""
    options = PARSER.parse_args(argv)
    sets = options.set or {"": {}}
    if options.against and (sets.keys() != {""} or options.rounds < LEAST):
        PARSER.error(f"--against: want no --set, and --rounds {LEAST} or more, for an interval")
    with contextlib.ExitStack() as stack:
        ways = {}
        for root in [options.against, HERE] if options.against else [None]:
            folder = stack.enter_context(_package(root)) if root else None
            for name, variables in sets.items():
                ways[_name(root) if root else name] = folder, variables
        found: dict[str, list[Rows]] = {name: [] for name in ways}
        for turn in range(options.rounds):
            for name in [*ways][:: -1 if turn % 2 else 1]:
                found[name].append(_run(name, *ways[name], [options.benchmark, *options.args]))
    first = next(iter(ways))
    rows = [row for name in ways for row in _rows(name, found[name], first, found[first])]
    report.Table(COLUMNS).add(*rows)
    if options.json:
        report.save(options.json, {"bench": "compare", "rows": rows})
    return judge(options.against, rows) if options.against else 0


def judge(against: Path, rows: Rows) -> int:
    """The exit status: 1 if this build is slower, which is said on standard error."""
    slower = [row for row in rows if row["ratio_low"] and row["ratio_low"] > LIMIT]
    for row in slower:
        text = "{transport}, {op}, {bytes_out} B out, {bytes_back} B back: {ratio:.3f} times"
        print(f"bench: slower than {against}: {text.format(**row)}", file=sys.stderr)
    return int(bool(slower))


def _name(root: Path) -> str:
    """A checkout, for people: its folder, and its commit if it has one."""
    return f"{root} ({versions.commit(root / 'fserver')})".removesuffix(" ()")


def _run(way: str, folder: Path | None, variables: dict[str, str], args: list[str]) -> Rows:
    """Returns the rows of a round (none on the host of the servers); ends all its processes."""
    with tempfile.NamedTemporaryFile("r") as out:
        words = ["bench", *args, "--json", out.name]
        line = [sys.executable, "-m", "fserver", *words] if folder else command(*words)
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True, "text": True}
        with subprocess.Popen(line, cwd=folder, env={**os.environ, **variables}, **how) as child:
            try:
                printed, reason = child.communicate(timeout=TIMEOUT)[0], ""
            except subprocess.TimeoutExpired:
                printed, reason = "", f"no end within {TIMEOUT:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if reason or child.returncode:
            reason = reason or f"status {child.returncode}"
            raise BenchError(f"{way or 'compare'}: {' '.join(args)}: {reason}\n{printed}".strip())
        return list(json.load(out)["rows"])


def _rows(way: str, own: list[Rows], first: str, its_own: list[Rows]) -> Iterator[dict[str, Any]]:
    """Each row of a way over all rounds, beside that of the first way."""
    for mine, its in zip(zip(*own, strict=True), zip(*its_own, strict=True), strict=True):
        moved = mine[0]["bytes_out"], mine[0]["bytes_back"]
        ours, others = ([row for row in rows if row["p50_us"]] for rows in (mine, its))
        names = "/".join(dict.fromkeys(row["transport"] for row in (*mine, *its)))
        found = report.row(names, mine[0]["op"], moved, ours, others, mine[0]["groups"])
        ratios = [a["p50_us"] / b["p50_us"] for a, b in zip(ours, others, strict=False)]
        low, high = report.median_interval(ratios) if ratios else (None, None)
        found |= {"ratio": ratios and median(ratios) or None, "ratio_low": low, "ratio_high": high}
        members = zip(*(row["sent"] for row in mine), strict=False)  # of each, all rounds
        sent = [(rounds[0][0], sum(count for _, count in rounds)) for rounds in members]
        total = sum(count for _, count in sent)
        shares = ", ".join(f"{at} {100 * count / total:.0f} %" for at, count in sent)
        yield {**mine[0], **found, "baseline": first, "shares": shares, "way": way}


@contextlib.contextmanager
def _package(root: Path) -> Iterator[Path]:
    """A folder with a package of the checkout and of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="fserver-bench-") as folder:
        made = Path(folder) / "fserver"
        made.mkdir()
        ours = [Path(__file__).resolve().parents[1] / name for name in OURS]
        for entry in (*ours, *(root / "fserver").iterdir()):
            if entry.name != "__pycache__" and not (made / entry.name).exists():
                (made / entry.name).symlink_to(entry)
        yield Path(folder)
