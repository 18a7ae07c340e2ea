"""Times what is inside of stream channels between two GPUs (or two processes on one): what their
calls cost the CPU. `fserver bench graph trips` times channels themselves.

    python tests/gpu/bench_channel.py [--json FILE] [--runs N] [--sweep] [--extras]

--sweep times round trips with other thresholds and numbers of blocks too. --extras times nothing
but what a channel's kernels have beyond flags and packets: in turn with them, the same kernels
without the abort word and the clock, without more than one peer and tensor, without row counts, and
without any of these.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from pair import Pair, Side  # noqa: E402

from fserver.percentiles import percentile  # noqa: E402

KIB = 1 << 10
WORK = [(4 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (896 * KIB, 1792 * KIB)]
INNER = 20


def _row(values: list[float], by_gpu: Sequence[float] = (), **what: Any) -> dict[str, Any]:
    row = {
        **what,
        "p50_us": round(percentile(sorted(values), 50), 2),
        "p99_us": round(percentile(sorted(values), 99), 2),
        "min_us": round(min(values), 2),
        "n": len(values),
    }
    for p in (50, 99) if by_gpu else ():
        row[f"gpu_p{p}_us"] = round(percentile(sorted(by_gpu), p), 2)
    return row


def _time(side: Side, run: Any, count: int, per: int, by_gpu: bool = False) -> list[float]:
    """Microseconds of each of count runs, divided by per; both sides begin together. by_gpu: from
    the start to the end on the GPU, without what the CPU takes to launch it and to be woken."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    values = []
    gc.collect()
    gc.disable()
    for i in range(count + 5):
        torch.cuda.synchronize()
        side.together()
        started = time.perf_counter_ns()
        if by_gpu:
            begin.record()
        run()
        if by_gpu:
            end.record()
        torch.cuda.current_stream().synchronize()
        took = (time.perf_counter_ns() - started) / 1000
        if i >= 5:
            values.append((begin.elapsed_time(end) * 1000 if by_gpu else took) / per)
    gc.enable()
    return values


def _bytes(side: Side, n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.uint8, device=f"cuda:{side.device}")


def _trips(side: Side, channel: Any, graph: bool) -> tuple[torch.cuda.Stream, Any]:
    """A stream, and what makes `inner` round trips on it, as a graph or one by one."""
    first, second = (
        (channel.send, channel.recv) if side.index == 0 else (channel.recv, channel.send)
    )

    def body() -> None:
        for _ in range(INNER):
            first()
            second()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        if not graph:
            return stream, body
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            body()
        return stream, captured.replay


def _round_trips(side: Side, channel: Any, graph: bool, count: int) -> list[list[float]]:
    """Microseconds of one of INNER round trips, by the CPU's clock and by the GPU's."""
    stream, run = _trips(side, channel, graph)
    with torch.cuda.stream(stream):
        return [_time(side, run, count, INNER, by_gpu) for by_gpu in (False, True)]


def round_trips(
    side: Side, push: int, pull: int, count: int, table: dict[str, Any]
) -> dict[str, Any]:
    """A channel without nodes, with a table of its own, in a graph."""
    out, into = (push, pull) if side.index == 0 else (pull, push)
    channel = side.open([_bytes(side, out)], [_bytes(side, into)], "kernel", **table)
    values = _round_trips(side, channel, True, count)
    ok = channel.status() == (0, 0)
    side.barrier()
    channel.close()
    side.barrier()
    work = f"channel kernel, graph x{INNER}"
    return _row(*values, work=work, push=push, pull=pull, ok=ok, table=table)


def calls(side: Side, mode: str, count: int) -> dict[str, Any]:
    """What send() and recv() cost the CPU, without waiting for the GPU."""
    channel = side.open([_bytes(side, 4096)], [_bytes(side, 4096)], mode)
    first, second = (
        (channel.send, channel.recv) if side.index == 0 else (channel.recv, channel.send)
    )
    values = []
    for _ in range(count):
        started = time.perf_counter_ns()
        for _ in range(50):
            first()
            second()
        values.append((time.perf_counter_ns() - started) / 1000 / 100)
        torch.cuda.synchronize()
        side.barrier()
    channel.close()
    side.barrier()
    return _row(values, work=f"channel {mode}, CPU time of a call")


# What is cut out of the kernels' source: text, and what stands in its place.
WATCH = [
    (
        """    if (++polls % kPolls != 0)
      return false;
    since = ask(h, peer, since, polls);
    return since == kOver;""",
        "    return false;",
    ),
    ("dead = load_own(h.dead), seq", "dead = 0, seq"),
]
PEERS = [
    ("  if (a.head.count == 1)\n    send(", "  if (true)\n    send("),
    ("  if (a.head.count == 1)\n    recv(", "  if (true)\n    recv("),
]
ROWS = [
    ("      had = load_own64(s.counted);", "      ;"),
    ("    if (rows != had)\n      *(u64 *)s.counted = rows;", ""),
    ("(u64)s.rows << 32 | seq", "seq"),
]
WITHOUT: dict[str, list[tuple[str, str]]] = {
    "nothing": [],
    "abort word and clock": WATCH,
    "peers": PEERS,
    "rows": ROWS,
    "any of these": [*WATCH, *PEERS, *ROWS],
}


def extras(side: Side, push: int, pull: int, count: int) -> list[dict[str, Any]]:
    """Round trips in graphs of channels whose kernels lack something, in turn."""
    from fserver.channel import gpu, nvrtc

    out, into = (push, pull) if side.index == 0 else (pull, push)
    full = nvrtc.image
    graphs, channels = {}, []
    for what, cuts in WITHOUT.items():

        def image(source: str, arch: int, cuts: list[tuple[str, str]] = cuts) -> bytes:
            for text, instead in cuts:
                if source.count(text) != 1:
                    raise AssertionError(f"the kernels have changed, and have no longer:\n{text}")
                source = source.replace(text, instead)
            return full(source, arch)

        gpu.nvrtc.image = image
        try:
            channel = side.open([_bytes(side, out)], [_bytes(side, into)], "kernel")
        finally:
            gpu.nvrtc.image = full
        channels.append(channel)
        graphs[what] = _trips(side, channel, graph=True)
    took: dict[str, list[float]] = {what: [] for what in WITHOUT}
    for _ in range(count):
        for what, (stream, replay) in graphs.items():
            with torch.cuda.stream(stream):
                took[what] += _time(side, replay, 10, INNER)
    rows = []
    for what, values in took.items():
        rows.append(
            _row(values, work=f"kernel graph x{INNER}, without {what}", push=push, pull=pull)
        )
        rows[-1]["costs_us"] = round(rows[0]["p50_us"] - rows[-1]["p50_us"], 2)
    for channel in channels:
        assert channel.status() == (0, 0)
    side.barrier()
    for channel in channels:
        channel.close()
    side.barrier()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--runs", type=int, default=40, help="of each measurement")
    parser.add_argument(
        "--sweep", action="store_true", help="other thresholds and block counts too"
    )
    parser.add_argument("--extras", action="store_true", help="only what these cost")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    devices = (0, 1) if gpus > 1 else (0, 0)
    count = args.runs if gpus > 1 else 5
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "devices": devices,
        "rows": [],
    }

    def add(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    pair = Pair(devices)
    failed, failures = False, 0
    jobs: list[tuple[Any, dict[str, Any]]] = []
    for mode in ("kernel", "copy"):
        jobs.append((calls, {"mode": mode, "count": 5}))
    if args.sweep:
        what: dict[str, Any] = {"count": count // 3}
        push, pull = WORK[2]
        for blocks in (8, 12, 16, 24, 32):
            table: dict[str, Any] = {"blocks": ((1 << 62, blocks),)}
            jobs.append((round_trips, {**what, "push": push, "pull": pull, "table": table}))
        for size in (32 * KIB, 128 * KIB, 256 * KIB, 512 * KIB):
            for most in (0, 1 << 30):
                table = {"packets_up_to": most, "blocks": ((1 << 62, 16),)}
                jobs.append((round_trips, {**what, "push": size, "pull": size, "table": table}))
    if args.extras:
        jobs = [(extras, {"push": out, "pull": back, "count": count // 4}) for out, back in WORK]
    for function, kwargs in jobs:
        print(f"... {function.__name__} {kwargs}", file=sys.stderr, flush=True)
        try:
            rows = pair.run(function, 30, **kwargs)[0]
            for row in rows if isinstance(rows, list) else [rows]:
                add(row)
        except Exception as error:  # the other rows are of interest still
            failed = True
            print(f"FAIL {function.__name__} {kwargs}: {error}", flush=True)
            pair = Pair(devices)
            if (failures := failures + 1) == 2:
                break
    pair.close()
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
