"""Rows of results: their arithmetic, tables, files, and what machine they are from."""

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fserver import versions
from fserver.percentiles import percentile

from .errors import BenchError

# Of one round: iters, p50_us, p99_us, ... and what a benchmark adds.
Figures = dict[str, Any]

Rounds = Sequence[Figures]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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
    }


# The parts of a round trip, from the 8 stamps of fetch_trace, in the order in which they happen;
# that in the network is there and back. They add up to the whole. Differences are taken within one
# process, so the clocks of the two need not agree.
PARTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "post": ("worker: from push_pull to the post", (1, 0)),
    "network": ("network, both directions: (6 - 1) - (5 - 2)", (6, 1, 2, 5)),
    "deliver": ("server: from the receipt to get_batch's return", (3, 2)),
    "serve": ("server: the application, until it calls respond", (4, 3)),
    "answer": ("server: from respond to the post", (5, 4)),
    "complete": ("worker: from the receipt to the completion", (7, 6)),
}


def parts(traces: Sequence[Sequence[int]]) -> Figures:
    """The median microseconds of each part, over round trips with these stamps."""
    spans = {name: list(zip(at[::2], at[1::2], strict=True)) for name, (_, at) in PARTS.items()}
    return {
        name: statistics.median(sum(t[end] - t[start] for end, start in both) for t in traces) / 1e3
        for name, both in spans.items()
    }


def show_size(count: int) -> str:
    """Bytes as people write them: "64 B", "4 KiB"."""
    for unit in ("G", "M", "K"):
        if count and count % UNITS[unit] == 0:
            return f"{count // UNITS[unit]} {unit}iB"
    return f"{count} B"


def row(
    name: str, op: str, moved: tuple[int, int], own: Rounds, raw: Rounds, groups: int = 1
) -> dict[str, Any]:
    """One result: medians over the rounds of `own` and of `raw`, in µs; both may be empty. GB/s
    counts the bytes of both directions, of all groups, over the median round trip. The ratio is
    the time per request by that of a raw round trip."""
    result: dict[str, Any] = {"transport": name, "op": op, "rounds": len(own), "groups": groups}
    result |= {"bytes_out": moved[0], "bytes_back": moved[1]}
    result["iters"] = own[0]["iters"] if own else None
    for prefix, rounds, requests in (("", own, groups), ("baseline_", raw, 1)):
        for key in ("p50_us", "p99_us"):
            values = [r[key] for r in rounds]
            result[prefix + key] = round(statistics.median(values), 4) if values else None
        p50 = result[prefix + "p50_us"]
        result[prefix + "gbps"] = p50 and round(requests * sum(moved) / p50 / 1e3, 4)
        result[prefix + "p50_us_rounds"] = [r["p50_us"] for r in rounds]
    each = result["p50_us"] / groups if own else None
    result["per_request_us"] = each and round(each, 4)
    result["ratio"] = round(each / result["baseline_p50_us"], 4) if each and raw else None
    return result


TEXT = ("place", "device", "memory", "transport", "op", "way")
MEASURED = ("transport", "op", "bytes_out", "bytes_back", "p50_us", "p99_us")
RAW = ("gbps", "baseline_p50_us", "baseline_p99_us", "baseline_gbps", "ratio")


class Table:
    """Prints results under titles, each as it comes. The columns are keys of the results."""

    def __init__(self, keys: Sequence[str]):
        from rich.console import Console

        self._keys, self._console = keys, Console(width=1000, highlight=False, markup=False)
        self._print(*(key.replace("baseline_", "raw_") for key in keys))

    def add(self, *results: dict[str, Any]) -> None:
        """Prints rows; one that was skipped ends in the reason."""
        for result in results:
            reason = [f"skipped: {result['skipped']}"] if result.get("skipped") else []
            self._print(*(_cell(key, result[key]) for key in self._keys), *reason)

    def _print(self, *cells: str) -> None:
        from rich.table import Table as Grid

        grid = Grid.grid(padding=(0, 2, 0, 0))
        for key in self._keys:
            width = 10 if key in TEXT else max(len(key), 9)
            grid.add_column(justify="left" if key in TEXT else "right", min_width=width)
        grid.add_row(*cells)
        self._console.print(grid)


def _cell(key: str, value: Any) -> str:
    if value is None or key.startswith("bytes"):
        return "-" if value is None else show_size(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def machine(cores: tuple[int, int]) -> dict[str, Any]:
    """What the figures are measured on. Warns if the cores have other work to do."""
    import psutil

    load = psutil.cpu_percent(0.3, percpu=True)
    busy = [round(load[core]) for core in cores]
    if max(busy) > 10:
        text = f"bench: cores {cores} are {busy} % busy with other programs: the results, most of "
        print(text + "all those of the raw baseline, will be noisy", file=sys.stderr)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu.rpartition(": ")[2],
        "cores": os.cpu_count(),
        "pinned": list(cores),
        "busy_percent": busy,
        "kernel": platform.platform(),
        "python": platform.python_version(),
        "versions": " ".join(versions.text().split()),
    }


def save(path: str, results: dict[str, Any]) -> None:
    """Writes what --json asks for, with the command. Raises BenchError: the disk is full, say."""
    results = {**results, "command": shlex.join(["fserver", *sys.argv[1:]])}
    try:
        Path(path).write_text(json.dumps(results, indent=1, default=str) + "\n")
    except OSError as error:
        raise BenchError(f"--json {path}: {error.strerror} (give another file)") from None
