"""Measures stream channels in CUDA graphs, with the traffic of a disaggregated model.

There are workers (attention) and servers (FFN), one process for each GPU. In each layer and for
each stage (micro-batch, with a channel of its own), a worker sends int8 [rows, width] to every
server and receives bf16 [rows, width] from each. Both sides run a light kernel in between. Each
side captures all layers and stages in one graph and replays it.

af       the time of a micro-batch (the time of a graph divided by layers x stages), and the spread
         of the time of a graph (one token). Data is checked. Streams: with `two`, sends have a
         stream of their own; with `one`, everything is on one stream; with `each`, the graph has a
         branch for each stage. In rows with `by`, another library moves the same tensors between
         the same kernels: NCCL's send and recv, copies and flags in torch's symmetric memory, or
         puts of NVSHMEM. A library that does not work here is `skipped`. --modes or --beside
         without a name leaves these rows out.
overlap  how much a loop of GEMMs and this traffic slow each other, with and without the kernels of
         the model in the traffic. `none` has no traffic and shows the error of the measurement.
         `plain` makes the same copies as `copy` at the same rate, but nothing waits for them. Rows
         with `by` are as in af. The columns `between` are the limits of the 95 %
         confidence interval of the median.
memory   memory of processes and GPUs before and after many exchanges.
zero-sm  the kernels that run on the GPU during round trips of push_pull and of channels, by
         torch.profiler. Mode `kernel` runs kernels, which shows that the profiler sees them.
trips    round trips of a channel between one worker and one server, and messages of 64 MiB. The
         same is measured with other libraries, with plain copies (`wire`), and with a program in
         CUDA (`raw`), if nvcc is installed. Mode `host` is measured over cma and tcp. Times are
         microseconds of a round trip or of a message. The host's clock measures from before the
         launch until the stream is idle; times with the prefix `gpu_` are from CUDA events. Data is
         compared before and after each timing, in memory that held other values.

--dry uses tensors on the CPU, loops instead of graphs, and gloo instead of NCCL: it checks the
program, not the speed.
The JSON file is written after each row. The exit status is 1 if a row failed or data was wrong. It
is 0 if only a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch

from fserver.channel.describe import mode_named

from .. import others, trips
from ..errors import BenchError
from ..options import output, positive, positive_milliseconds, positive_seconds
from ..report import save
from ..sides import Crew
from ..spawned import by_the_byte
from . import summary
from .af import af, af_by
from .memory import memory
from .overlap import overlap, overlap_by
from .zero_sm import KINDS, zero_sm

MODES = ("kernel", "copy")  # of channels on GPUs
STREAMS = ("two", "one", "each")
# Options: default and help, which begins with the works that they are for alone.
OPTIONS: dict[str, tuple[Any, str]] = {
    "layers": (61, "number of layers (default 61)"),
    "stages": (3, "number of micro-batches (default 3)"),
    "rows": (128, "rows of a tensor (default 128)"),
    "width": (7168, "width of a tensor, a multiple of 4 (default 7168)"),
    "replays": (300, "af: number of timed replays for each row (default 300)"),
    "parts": (6, "af: number of parts into which the replays are divided (default 6)"),
    "size": (8192, "overlap: size of the GEMM (default 8192)"),
    "rounds": (200, "overlap: number of rounds, with and without traffic, for a row (default 200)"),
    "ms": (30.0, "overlap: length of each part, in milliseconds (default 30)"),
    "exchanges": (10**6, "memory: number of exchanges for each mode (default 1000000)"),
    "seconds": (40.0, "overlap, memory: longest time of a row (default 40)"),
    "trips": (20, "zero-sm: number of round trips (default 20)"),
    "runs": (1000, "trips: number of runs of a graph of 20 round trips (default 1000)"),
}


def _rows(args: argparse.Namespace) -> list[tuple[Callable[..., Any], dict[str, Any], float]]:
    """Function, what differs, and seconds; what is most likely to fail comes last."""
    found: list[tuple[Callable[..., Any], dict[str, Any], float]]
    streams = "one" if args.dry else "two"
    if args.work == "af":
        order = [(m, how) for how in (("one",) if args.dry else STREAMS) for m in args.modes]
        found = [(af, {"mode": m, "streams": how}, 40.0) for m, how in order]
        return found + [(af_by, {"by": way, "streams": streams}, 30.0) for way in args.beside]
    if args.work == "overlap":
        limit = 2 * args.seconds + 40
        parts = [(m, kernels) for kernels in (False, True) for m in args.modes]
        if not args.dry:
            parts = [("none", False), ("plain", False), *parts]
        found = [(overlap, {"mode": m, "compute": kernels}, limit) for m, kernels in parts]
        what = {"compute": True, "streams": streams}
        return found + [(overlap_by, {"by": way, **what}, limit) for way in args.beside]
    if args.work == "memory":
        return [(memory, {"mode": m}, 2 * args.seconds + 30) for m in args.modes]
    if args.work == "trips":
        return trips.rows(args.modes, args.beside, args.runs, args.dry)
    return [(zero_sm, {"kind": kind}, 40) for kind in KINDS]


def _measured(
    args: argparse.Namespace, options: dict[str, Any]
) -> Generator[list[dict[str, Any]], None, None]:
    """Rows, one by one or several that belong together. Processes that have used another's way are
    not used for anything else, and what has failed of a way is not tried again."""
    crew, used = None, None
    gave_up: dict[tuple[Any, ...], str] = {}
    done: list[dict[str, Any]] = []
    try:
        for function, what, limit in _rows(args):
            row = {"work": args.work, **{k: v for k, v in what.items() if k != "runs"}}
            by = what.get("by")
            kind = by, what.get("how")
            if by and args.dry and by != "nccl":
                gave_up[kind] = "it takes GPUs"
            if kind in gave_up:
                yield [{**row, "skipped": gave_up[kind]}]
                continue
            way = by if by in others.WAYS or by == "wire" else None  # what changes its process
            if crew and way != used:
                crew.close()
                crew = None
            try:
                if not crew:
                    exact = args.work == "memory"
                    with by_the_byte() if exact else contextlib.nullcontext():
                        crew = Crew(args.shape, args.dry, exact)
                used = way
                results = crew.run(function, limit, {**options, **what})
                row["wrong"] = sum(r["wrong"] for r in results)
                if args.work == "trips":
                    rows = trips.summary(row, results[0], done)
                else:
                    row.update(sides=results, **summary.OF[args.work](results, args))
                    if by:
                        del row["meets"]  # a target of ours
                    rows = [row]
            except Exception as error:  # the other rows are of interest still
                if crew:
                    crew.close()
                crew = None
                if by:
                    print(f"{by}: {error!r}\n{error}", file=sys.stderr, flush=True)
                    row["skipped"] = gave_up[kind] = others.reason(error)
                else:
                    row["error"] = traceback.format_exc()
                rows = [row]
            done += rows
            yield rows
    finally:
        if crew:
            crew.close()


def _print(row: dict[str, Any]) -> None:
    if "error" in row:
        what = {k: v for k, v in row.items() if k not in ("work", "error")}
        print(f"FAIL {row['work']} {what}:\n{row['error']}", flush=True)
        return
    shown = "  ".join(f"{k}={v}" for k, v in row.items() if k != "sides")
    print(f"FAIL wrong data: {shown}" if row.get("wrong") else shown, flush=True)


def _shape(text: str) -> tuple[int, int]:
    a, _, b = text.partition("x")
    try:
        return positive(a), positive(b)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: want workers x servers, for example 2x2, 1 or more of each"
        ) from None


def _width(text: str) -> int:
    width = positive(text)
    if width % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: want a multiple of 4")
    return width


TYPES = {"width": _width, "ms": positive_milliseconds, "seconds": positive_seconds}


def _parser() -> argparse.ArgumentParser:
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="fserver bench graph",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    measured = ["af", "overlap", "memory", "zero-sm", "trips"]
    parser.add_argument("work", choices=measured, help="the measurement, see below")
    parser.add_argument("--json", metavar="FILE", type=output, help="write the results to FILE")
    parser.add_argument("--dry", action="store_true", help="use tensors on the CPU, see below")
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="AxF",
        help="numbers of workers and servers (default: 2x2 with 4 or more GPUs, else 1x1)",
    )
    parser.add_argument(
        "--modes",
        nargs="*",
        type=mode_named,
        choices=trips.MODES,
        help="modes of the channels (default: all, but host only with trips)",
    )
    parser.add_argument(
        "--beside",
        nargs="*",
        default=others.WAYS,
        choices=others.WAYS,
        help="af, overlap, trips: other libraries to compare with (default: all)",
    )
    for name, (default, text) in OPTIONS.items():
        kind = TYPES.get(name, positive)
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace, gpus: int) -> None:
    """Fills in what was not given, and refuses what does not go together."""
    if args.modes is None:
        args.modes = trips.MODES if args.work == "trips" else MODES
    if args.work != "trips" and "host" in args.modes:
        parser.error(f"--modes: 'host': want some of {', '.join(MODES)} with {args.work}")
    if args.work in ("zero-sm", "trips"):
        args.shape = (1, 1)
    args.shape = args.shape or ((2, 2) if args.dry or gpus >= 4 else (1, 1))
    shared = gpus > 0 and "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if not args.dry and not shared and gpus < sum(args.shape):
        raise BenchError(
            f"torch sees {gpus} GPUs, but {sum(args.shape)} are needed (use NVIDIA's multi-process "
            "service with one GPU, which needs CUDA_MPS_PIPE_DIRECTORY, or --dry without a GPU)"
        )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that all rows of this work have."""
    options: dict[str, Any] = {}
    if args.work != "trips":
        options["shape"] = (args.layers, args.stages, args.rows, args.width)
        for name, (_, text) in OPTIONS.items():
            works, colon, _ = text.partition(": ")
            if colon and args.work in works.split(", "):
                options[name] = getattr(args, name)
    return options


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    _checked(parser, args, gpus)
    options = _options(args)
    result: dict[str, Any] = {"arguments": vars(args), "torch": torch.__version__, "gpus": gpus}
    result["rows"] = []
    failures = 0
    with contextlib.closing(_measured(args, options)) as pieces:
        for rows in pieces:
            for row in rows:
                _print(row)
            failures += any("error" in row or row.get("wrong", 0) > 0 for row in rows)
            result["rows"] += rows
            if args.json:
                save(args.json, result)
            if failures == 2:
                break
    return 1 if failures else 0
