"""Percentiles, tables, sizes, and what machine this is."""

import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

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
    iters: int,
    measured: list[dict[str, float]],
    baseline: list[dict[str, float]],
) -> dict[str, Any]:
    """One result: medians over the rounds, and the ratio of the medians.

    `measured` and `baseline` hold the figures of each round, in µs; `baseline` may be empty.
    GB/s counts the bytes of both directions over the median round trip.
    """
    result: dict[str, Any] = {
        "transport": transport,
        "op": op,
        "bytes_out": out,
        "bytes_back": back,
        "iters": iters,
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
    result["ratio"] = round(result["p50_us"] / result["baseline_p50_us"], 3) if baseline else None
    return result


COLUMNS = (  # title, width, key, format
    ("transport", -9, "transport", str),
    ("op", -9, "op", str),
    ("out", 8, "bytes_out", show_size),
    ("back", 8, "bytes_back", show_size),
    ("p50 µs", 11, "p50_us", "{:.1f}".format),
    ("p99 µs", 11, "p99_us", "{:.1f}".format),
    ("GB/s", 7, "gbps", "{:.3f}".format),
    ("raw p50", 11, "baseline_p50_us", "{:.1f}".format),
    ("raw p99", 11, "baseline_p99_us", "{:.1f}".format),
    ("raw GB/s", 8, "baseline_gbps", "{:.3f}".format),
    ("ratio", 6, "ratio", "{:.2f}".format),
)


def header() -> str:
    """The titles of the table."""
    return _line(title for title, *_ in COLUMNS)


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    return _line("-" if result[key] is None else show(result[key]) for _, _, key, show in COLUMNS)


def _line(cells: Any) -> str:
    widths = (width for _, width, _, _ in COLUMNS)
    return "  ".join(
        text.rjust(width) if width > 0 else text.ljust(-width)
        for text, width in zip(cells, widths, strict=True)
    ).rstrip()


def machine(cores: tuple[int, int] | None) -> dict[str, Any]:
    """What the figures are measured on. Warns if the cores have other work to do."""
    busy = _busy(cores) if cores else None
    if busy and max(busy) > 10:
        print(
            f"bench: cores {cores} are {busy[0]} and {busy[1]} % busy with something else: expect "
            "noise, most of all from the raw baseline, which spins",
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
        "fserver": _version("fserver"),
    }


def show_machine(facts: dict[str, Any]) -> str:
    """The same in one line."""
    pinned = facts["pinned"]
    where = f"worker on core {pinned[0]}, server on core {pinned[1]}" if pinned else "not pinned"
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({where}), {facts['kernel']}, "
        f"python {facts['python']}, torch {facts['torch']}, fserver {facts['fserver']}"
    )


def _busy(cores: tuple[int, int], seconds: float = 0.3) -> list[int]:
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def write_json(path: str, facts: dict[str, Any], **results: Any) -> None:
    """Writes results, the machine and the command line."""
    with open(path, "w") as out:
        json.dump({**results, "machine": facts, "command": shlex.join(sys.argv)}, out, indent=1)
        out.write("\n")
