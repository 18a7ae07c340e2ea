"""Rows of results: their arithmetic, tables, files, and what machine they are from."""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from . import plot
from .errors import BenchError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` of the sorted ones do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def parse_size(text: str) -> int:
    """Bytes of "64", "4K", "1MiB", ..."""
    match = re.fullmatch(r"(\d+)([KMG]?)(iB|B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r}: want a number of bytes, with K, M or G for powers of 1,024")
    return int(match[1]) * UNITS[match[2].upper()]


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
    transport: str,
    op: str,
    out: int,
    back: int,
    measured: list[dict[str, Any]],
    baseline: list[dict[str, Any]],
    way: str | None = None,
    missing: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One result: medians over the rounds, and the ratio of the medians.

    `measured` and `baseline` hold the figures of each round, in µs; both may be empty. `way`
    names the baseline, `missing` says why there is none. GB/s counts the bytes of both directions
    over the median round trip.
    """
    result: dict[str, Any] = {
        "transport": transport,
        "op": op,
        "bytes_out": out,
        "bytes_back": back,
        "iters": measured[0]["iters"] if measured else None,
        "rounds": len(measured),
    }
    for prefix, rounds in (("", measured), ("baseline_", baseline)):
        for key in ("p50_us", "p99_us"):
            result[prefix + key] = (
                round(statistics.median(r[key] for r in rounds), 3) if rounds else None
            )
        p50 = result[prefix + "p50_us"]
        result[prefix + "gbps"] = round(gigabytes_per_second(out + back, p50), 4) if p50 else None
        result[prefix + "p50_us_rounds"] = [r["p50_us"] for r in rounds]
    both = measured and baseline
    result["ratio"] = round(result["p50_us"] / result["baseline_p50_us"], 3) if both else None
    result["baseline"] = way if baseline else None
    result["baseline_missing"] = None if baseline else missing
    result["skipped"] = None
    return {**result, **more}


def skipped(
    transport: str, op: str, out: int, back: int, reason: str, **more: Any
) -> dict[str, Any]:
    """The row of what could not be measured."""
    return {**row(transport, op, out, back, [], [], **more), "skipped": reason}


class Column(NamedTuple):
    """Of a table: a negative width is for text, which starts at the left."""

    title: str
    width: int
    key: str
    show: Callable[[Any], str]


OP = Column("op", -9, "op", str)
TRANSPORT = Column("transport", -10, "transport", str)
MOVED = (
    Column("out", 8, "bytes_out", show_size),
    Column("back", 8, "bytes_back", show_size),
)
TIMES = (
    Column("p50 µs", 11, "p50_us", "{:.1f}".format),
    Column("p99 µs", 11, "p99_us", "{:.1f}".format),
)
SPEED = Column("GB/s", 7, "gbps", "{:.3f}".format)
RAW = (
    Column("raw p50", 11, "baseline_p50_us", "{:.1f}".format),
    Column("raw p99", 11, "baseline_p99_us", "{:.1f}".format),
    Column("raw GB/s", 8, "baseline_gbps", "{:.3f}".format),
)
RATIO = Column("ratio", 6, "ratio", "{:.2f}".format)
COLUMNS = (TRANSPORT, OP, *MOVED, *TIMES, SPEED, *RAW, RATIO)


class Table:
    """Prints rows when they are there."""

    def __init__(self, columns: Sequence[Column] = COLUMNS):
        self._columns = columns

    def header(self) -> str:
        """The titles."""
        return self._line(column.title for column in self._columns)

    def line(self, result: dict[str, Any]) -> str:
        """A row; one that was skipped ends in the reason."""
        cells = ["-" if result[c.key] is None else c.show(result[c.key]) for c in self._columns]
        reason = result.get("skipped")
        return self._line(cells) + (f"  skipped: {reason}" if reason else "")

    def _line(self, cells: Iterable[str]) -> str:
        return "  ".join(
            text.rjust(column.width) if column.width > 0 else text.ljust(-column.width)
            for text, column in zip(cells, self._columns, strict=True)
        ).rstrip()


class Progress:
    """A bar on standard error, where that is a terminal and tqdm is installed."""

    def __init__(self, total: float, name: str, unit: str = "round"):
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=name, unit=unit, leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, count: float = 1) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.update(count)

    def print(self, text: str) -> None:
        """A line of output, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()


def machine(cores: tuple[int, ...] | None) -> dict[str, Any]:
    """What the figures are measured on. Warns if the cores have other work to do."""
    busy = _busy(cores) if cores else None
    if busy and max(busy) > 10:
        print(
            f"bench: cores {cores} are {' and '.join(map(str, busy))} % busy with other programs, "
            "so the results will be noisy, most of all those of the raw baseline, which spins",
            file=sys.stderr,
        )
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "pinned": list(cores) if cores else None,
        "busy_percent": busy,
        "kernel": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "fserver": _own(),
    }


def show_machine(facts: dict[str, Any]) -> str:
    """The same in one line."""
    pinned = facts["pinned"]
    where = f"pinned to {','.join(map(str, pinned))}" if pinned else "not pinned"
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({where}), {facts['kernel']}, "
        f"python {facts['python']}, torch {facts['torch']}, fserver {facts['fserver']}"
    )


def _busy(cores: tuple[int, ...], seconds: float = 0.3) -> list[int]:
    """Percent of each core that others use, the hypervisor included."""

    def ticks(core: int) -> tuple[int, int]:
        with open("/proc/stat") as stat:
            for text in stat:
                name, *fields = text.split()
                if name == f"cpu{core}":
                    user_to_steal = [int(field) for field in fields[:8]]
                    return sum(user_to_steal[3:5]), sum(user_to_steal)
        return 0, 0

    before = [ticks(core) for core in cores]
    time.sleep(seconds)
    after = [ticks(core) for core in cores]
    busy = []
    for (idle0, all0), (idle1, all1) in zip(before, after, strict=True):
        busy.append(round(100 - 100 * (idle1 - idle0) / max(all1 - all0, 1)))
    return busy


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            for text in cpuinfo:
                if text.startswith("model name"):
                    return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(root: Path) -> str | None:
    """The commit of a source tree or a device bundle; None if it is neither."""
    try:
        if not (root / ".git").exists():
            return (root / "build/commit").read_text().strip()
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(
            describe, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _own() -> str:
    """The version, and the commit if there is one."""
    version, found = _version("fserver"), commit(Path(__file__).parents[2])
    return f"{version} ({found})" if found else version


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise BenchError("--device gpu: torch sees no GPU (run `fserver doctor` for the reason)")


def begin(options: argparse.Namespace, cores: tuple[int, ...] | None) -> dict[str, Any]:
    """Before anything is measured or printed: checks that there is a GPU if one is asked for, and
    that the results can be kept. Then prints on what is measured, and returns it.

    Raises:
        BenchError: one of them is missing.
    """
    if getattr(options, "device", "cpu") == "gpu":
        _need_gpu()
    if options.plot:
        plot.need()
    facts = machine(cores)
    print(show_machine(facts), flush=True)
    return facts


def finish(
    options: argparse.Namespace,
    bench: str,
    facts: dict[str, Any],
    rows: list[dict[str, Any]],
    **more: Any,
) -> None:
    """Writes the files that were asked for."""
    if options.json:
        results = {"bench": bench, "rows": rows, **more, "machine": facts}
        save(options.json, {**results, "command": shlex.join(["fserver", *sys.argv[1:]])})
    if options.plot:
        plot.save(options.plot, bench, rows, show_machine(facts))


def save(path: str, results: dict[str, Any]) -> None:
    """Writes what --json asks for.

    Raises:
        BenchError: the file cannot be written, though it seemed so at the beginning.
    """
    try:
        with open(path, "w") as out:
            json.dump(results, out, indent=1)
            out.write("\n")
    except OSError as error:
        raise BenchError(
            f"--json {path}: {error.strerror}: free some space, or give another file"
        ) from None
