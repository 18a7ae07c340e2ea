"""Rows of results: their arithmetic, tables, files, and what machine they are from."""

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fserver

from .errors import BenchError

Figures = dict[str, Any]
"""Of one round: iters, p50_us, p99_us, ... and what a benchmark adds."""

Rounds = Sequence[Figures]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` of the sorted ones do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, whatever the distribution; of fewer than 6 samples, the least
    and the largest. It reaches from the r-th smallest to the r-th largest sample, which leave out
    the median with a probability of 2 P(Binomial(count, 1/2) < r), for the largest r with at most
    5 %. (H. A. David, H. N. Nagaraja: Order Statistics, 3rd edition, 2003, section 7.1.)"""
    count, ordered = len(samples), sorted(samples)
    rank, left_out = 0, 1 / 2**count  # which is P(Binomial <= rank)
    while left_out <= 0.025:
        rank += 1
        left_out += math.comb(count, rank) / 2**count
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[-rank]


def figures(samples: list[int]) -> Figures:
    """Times in nanoseconds, as figures in microseconds."""
    ordered = sorted(samples)
    return {
        "iters": len(ordered),
        "p50_us": percentile(ordered, 50) / 1e3,
        "p99_us": percentile(ordered, 99) / 1e3,
        "min_us": ordered[0] / 1e3,
        "mean_us": sum(ordered) / len(ordered) / 1e3,
    }


def show_size(count: int) -> str:
    """Bytes as people write them: "64 B", "4 KiB"."""
    for unit in ("G", "M", "K"):
        if count and count % UNITS[unit] == 0:
            return f"{count // UNITS[unit]} {unit}iB"
    return f"{count} B"


def gigabytes_per_second(count: int, microseconds: float) -> float:
    """10^9 bytes per second."""
    return count / microseconds / 1e3


def row(
    transport: str, op: str, out: int, back: int, measured: Rounds = (), raw: Rounds = ()
) -> dict[str, Any]:
    """One result: medians over the rounds of `measured` and of `raw`, in µs, and their ratio; both
    may be empty. GB/s counts the bytes of both directions over the median round trip."""
    result: dict[str, Any] = {"transport": transport, "op": op, "bytes_out": out}
    result |= {"bytes_back": back, "rounds": len(measured)}
    result["iters"] = measured[0]["iters"] if measured else None
    for prefix, rounds in (("", measured), ("baseline_", raw)):
        for key in ("p50_us", "p99_us"):
            middle = statistics.median(r[key] for r in rounds) if rounds else None
            result[prefix + key] = middle and round(middle, 3)
        p50 = result[prefix + "p50_us"]
        result[prefix + "gbps"] = p50 and round(gigabytes_per_second(out + back, p50), 4)
        result[prefix + "p50_us_rounds"] = [r["p50_us"] for r in rounds]
    both = measured and raw
    result["ratio"] = round(result["p50_us"] / result["baseline_p50_us"], 3) if both else None
    return {**result, "baseline": None, "baseline_missing": None, "skipped": None}


class Column(NamedTuple):
    """Of a table: a negative width is for text, which starts at the left."""

    title: str
    width: int
    key: str
    show: Callable[[Any], str] = str


def number(title: str, width: int, key: str, digits: int = 1) -> Column:
    """A column of numbers with so many digits after the point."""
    return Column(title, width, key, f"{{:.{digits}f}}".format)


OP = Column("op", -9, "op")
TRANSPORT = Column("transport", -10, "transport")
MOVED = (Column("out", 8, "bytes_out", show_size), Column("back", 8, "bytes_back", show_size))
TIMES = (number("p50 µs", 11, "p50_us"), number("p99 µs", 11, "p99_us"))
SPEED = number("GB/s", 7, "gbps", 3)
RAW_P50 = number("raw p50", 11, "baseline_p50_us")
RAW_P99 = number("raw p99", 11, "baseline_p99_us")
RAW_SPEED = number("raw GB/s", 8, "baseline_gbps", 3)
RATIO = number("ratio", 6, "ratio", 2)
COLUMNS = (TRANSPORT, OP, *MOVED, *TIMES, SPEED, RAW_P50, RAW_P99, RAW_SPEED, RATIO)


def header(columns: Sequence[Column]) -> str:
    return _line(columns, [column.title for column in columns])


def line(columns: Sequence[Column], result: dict[str, Any]) -> str:
    """A row; one that was skipped ends in the reason."""
    cells = ["-" if result[c.key] is None else c.show(result[c.key]) for c in columns]
    reason = result.get("skipped")
    return _line(columns, cells) + (f"  skipped: {reason}" if reason else "")


def _line(columns: Sequence[Column], cells: Iterable[str]) -> str:
    both = [(column.width, text) for column, text in zip(columns, cells, strict=True)]
    return "  ".join(text.rjust(n) if n > 0 else text.ljust(-n) for n, text in both).rstrip()


def machine(cores: tuple[int, ...]) -> dict[str, Any]:
    """What the figures are measured on. Warns if the cores have other work to do."""
    import psutil

    from fserver import versions

    load = psutil.cpu_percent(0.3, percpu=True)
    busy = [round(load[core]) for core in cores]
    if max(busy) > 10:
        text = f"bench: cores {cores} are {busy} % busy with other programs: the results, most of "
        print(text + "all those of the raw baseline, will be noisy", file=sys.stderr)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("model name")), "")
    build = commit(Path(__file__).parents[1])
    return {
        "cpu": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "pinned": list(cores),
        "busy_percent": busy,
        "kernel": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": versions.torch(),
        "fserver": fserver.__version__ + (f" ({build})" if build else ""),
    }


def show_machine(facts: dict[str, Any]) -> str:
    where = "{cpu}, {cores} cores (pinned to {pinned[0]},{pinned[1]}), {kernel}".format(**facts)
    return where + ", python {python}, torch {torch}, fserver {fserver}".format(**facts)


def commit(package: Path) -> str | None:
    """The commit that a package fserver was built from; None if it does not say."""
    noted = package / "_commit"
    return noted.read_text().strip() if noted.is_file() else None


def save(path: str, results: dict[str, Any]) -> None:
    """Writes what --json asks for, with the command. Raises BenchError: the disk is full, say."""
    results = {**results, "command": shlex.join(["fserver", *sys.argv[1:]])}
    try:
        Path(path).write_text(json.dumps(results, indent=1, default=str) + "\n")
    except OSError as error:
        raise BenchError(f"--json {path}: {error.strerror} (give another file)") from None
