"""Pictures of results. matplotlib is imported only when one is asked for."""

from collections.abc import Callable, Sequence
from typing import Any

from .errors import BenchError

Rows = Sequence[dict[str, Any]]


def need() -> None:
    """Says at once what is missing, not when all has been measured.

    Raises:
        BenchError: there is no matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib (run pip install 'fserver[bench]')") from None


def save(path: str, bench: str, rows: Rows, machine: str) -> None:
    """Draws the rows of a benchmark into a file; its name says the format.

    Raises:
        BenchError: the file cannot be written, or there is nothing to draw.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if not row.get("skipped")]
    if not measured:
        raise BenchError(f"--plot {path}: nothing was measured")
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(f"fserver bench {bench}\n{machine}", fontsize=9)
    DRAW[bench](figure, measured)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # the directory, or the kind of file
        raise BenchError(f"--plot {path}: {error}") from None


def _sizes(figure: Any, rows: Rows) -> None:
    """Latency and ratio over the size."""
    latency, ratio = figure.subplots(1, 2)
    drawn_raw: set[tuple[str, str | None]] = set()  # others have the raw baseline of ours
    for (transport, op), line in _grouped(rows, "transport", "op").items():
        name = f"{transport} {op}" if len({row["op"] for row in rows}) > 1 else transport
        sizes = [max(row["bytes_out"], row["bytes_back"]) for row in line]
        drawn = latency.plot(sizes, [row["p50_us"] for row in line], marker="o", label=name)
        color = drawn[0].get_color()
        with_raw = [(n, row) for n, row in zip(sizes, line, strict=True) if row["ratio"]]
        if with_raw:
            sizes = [n for n, _ in with_raw]
            raw = [row["baseline_p50_us"] for _, row in with_raw]
            key = (op, line[0].get("baseline"))
            # Where the raw ways are rows themselves they have their own lines.
            if key not in drawn_raw and not any(r["transport"].startswith("raw") for r in rows):
                drawn_raw.add(key)
                latency.plot(sizes, raw, "--", color=color, label=f"{name}, raw")
            ratio.plot(
                sizes, [row["ratio"] for _, row in with_raw], marker="o", color=color, label=name
            )
    latency.set(title="Round trip, median", ylabel="µs", yscale="log")
    ratio.set(title="Ratio to the raw baseline", ylabel="p50 / raw p50", ylim=(0, None))
    ratio.axhline(1, color="gray", linewidth=0.8)
    for axes in (latency, ratio):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a tensor")
        axes.grid(alpha=0.3)
        if axes.lines[1:]:
            axes.legend(fontsize=8)


def _matrix(figure: Any, rows: Rows) -> None:
    """A panel for each size: bars of the operations at each place, and the raw baseline."""
    by_size = _grouped(
        [{**row, "size": max(row["bytes_out"], row["bytes_back"])} for row in rows], "size"
    )
    panels = figure.subplots(1, len(by_size), squeeze=False)[0]
    for axes, ((size,), some) in zip(panels, by_size.items(), strict=True):
        keys = ("place", "op", "device", "transport")
        names = ["\n".join(row[key] for key in keys) for row in some]
        axes.bar(names, [row["p50_us"] for row in some], label="p50")
        raw = [(n, row["baseline_p50_us"]) for n, row in zip(names, some, strict=True)]
        raw = [(name, us) for name, us in raw if us]
        if raw:
            axes.plot(*zip(*raw, strict=True), "k_", markersize=20, label="raw")
        axes.set(title=f"{size} bytes", ylabel="round trip, median, µs")
        axes.tick_params(axis="x", labelsize=6)
        axes.legend(fontsize=8)


def _af(figure: Any, rows: Rows) -> None:
    """The parts of a round trip on each other."""
    from .stamps import BUDGET_US, PARTS

    axes = figure.subplots()
    names = [f"{row['transport']}, {row['shape']}" for row in rows]
    bottom = [0.0] * len(rows)
    for part, text in PARTS.items():
        heights = [row["parts_us"][part] for row in rows]
        axes.bar(names, heights, bottom=bottom, width=0.4, label=text)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(BUDGET_US, color="black", linestyle="--", label="budget, 273 µs")
    axes.set(title="Where a round trip of one stage in one layer goes (medians)", ylabel="µs")
    axes.set_xlim(-0.6, len(rows) + 0.6)
    axes.legend(fontsize=8, loc="right")


def _bond(figure: Any, rows: Rows) -> None:
    """A panel for each size: the speed of each way."""
    by_size = _grouped(rows, "bytes_out")
    panels = figure.subplots(1, len(by_size), squeeze=False)[0]
    for axes, ((size,), some) in zip(panels, by_size.items(), strict=True):
        axes.bar([row["over"] for row in some], [row["gbps"] for row in some])
        axes.set(title=f"{size} bytes each way", ylabel="GB/s, both directions")
        axes.tick_params(axis="x", labelsize=6)


def _kv(figure: Any, rows: Rows) -> None:
    """Goodput and messages per second over the size."""
    goodput, messages = figure.subplots(1, 2)
    for key, line in _grouped(rows, "place", "memory", "transport", "op").items():
        found = [row["bytes"] for row in line]
        for axes, what in ((goodput, "goodput_gbps"), (messages, "messages")):
            axes.plot(found, [row[what] for row in line], marker="o", label=" ".join(key))
    goodput.set(title="Goodput of one direction, median", ylabel="Gbit/s", ylim=(0, None))
    messages.set(title="Messages, median", ylabel="messages/s", ylim=(0, None))
    for axes in (goodput, messages):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a key")
        axes.grid(alpha=0.3)
    goodput.legend(fontsize=7)


def _fanin(figure: Any, rows: Rows) -> None:
    """Time of a batch and of a request over the groups; or with and without idle groups."""
    if any(row["idle"] for row in rows):
        axes = figure.subplots()
        names = [f"{row['idle']} idle groups" for row in rows]
        axes.bar(names, [row["p50_us"] for row in rows], width=0.5)
        axes.set(title="Round trip beside idle worker groups, median", ylabel="µs")
        return
    batch, request = figure.subplots(1, 2)
    groups = [row["groups"] for row in rows]
    batch.plot(groups, [row["p50_us"] for row in rows], marker="o")
    batch.set(title="A batch, median", ylabel="µs", ylim=(0, None))
    request.plot(groups, [row["per_request_us"] for row in rows], marker="o", label="fserver")
    raw = [row["baseline_p50_us"] for row in rows]
    if all(raw):
        request.plot(groups, raw, "--", label="one raw round trip")
    request.set(title="Batch / groups", ylabel="µs per request", ylim=(0, None))
    request.legend(fontsize=8)
    for axes in (batch, request):
        axes.set_xlabel("worker groups")
        axes.grid(alpha=0.3)


def _threads(figure: Any, rows: Rows) -> None:
    """The time for an exchange: of one thread, and of two or beside one that asks for links."""
    axes = figure.subplots()
    names = [f"threads: {row['threads']}" for row in rows]
    axes.bar(names, [row["per_exchange_us"] for row in rows], width=0.5)
    axes.set(title="Threads of one worker: time for an exchange, median", ylabel="µs")


def _verify(figure: Any, rows: Rows) -> None:
    """Each round that was timed, over its bytes; and its ratio."""
    latency, ratio = figure.subplots(1, 2)
    timed = [one for row in rows for one in row["timed"]]
    for key, name in (("again_us", "fserver"), ("baseline_us", "raw, in one block")):
        points = [(_moved(one), one[key]) for one in timed if one[key]]
        if points:
            latency.plot(*zip(*points, strict=True), ".", alpha=0.6, label=name)
    points = [
        (_moved(one), one["again_us"] / one["baseline_us"]) for one in timed if one["baseline_us"]
    ]
    if points:
        ratio.plot(*zip(*points, strict=True), ".", alpha=0.6)
    latency.set(title="A round of random requests", ylabel="µs", yscale="log")
    ratio.set(title="Ratio to the raw baseline", ylabel="time / raw time", yscale="log")
    ratio.axhline(1, color="gray", linewidth=0.8)
    latency.legend(fontsize=8)
    for axes in (latency, ratio):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes there and back")
        axes.grid(alpha=0.3)


def _moved(one: dict[str, Any]) -> int:
    """At least 1, which a logarithm needs."""
    return max(one["bytes_out"] + one["bytes_back"], 1)


def _idle(figure: Any, rows: Rows) -> None:
    """CPU time of each state."""
    axes = figure.subplots()
    names = [f"{row['role']}: {row['state']}" for row in rows]
    axes.barh(names, [row["cpu_percent"] for row in rows])
    axes.set(title="CPU time while waiting", xlabel="percent of one core")


def _soak(figure: Any, rows: Rows) -> None:
    """Resident memory over the run."""
    axes = figure.subplots()
    for row in rows:
        sizes = row["resident_bytes"]
        axes.plot(
            [100 * i / (len(sizes) - 1) for i in range(len(sizes))],
            [(size - sizes[0]) / 1024 for size in sizes],
            marker="o",
            label=row["role"],
        )
    axes.set(title="Growth of resident memory", xlabel="percent of the run", ylabel="KiB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _grouped(rows: Rows, *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows that have the same values under `keys`, in order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


DRAW: dict[str, Callable[[Any, Rows], None]] = {
    "pingpong": _sizes,
    "ipc": _sizes,
    "cpp": _sizes,
    "kv": _kv,
    "matrix": _matrix,
    "af": _af,
    "bond": _bond,
    "fanin": _fanin,
    "threads": _threads,
    "verify": _verify,
    "idle": _idle,
    "soak": _soak,
}
