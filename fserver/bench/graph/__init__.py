"""`fserver bench graph`: measures stream channels in CUDA graphs."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from fserver.channel.describe import mode_named

from .. import libraries, rivals
from ..crew import Crew
from ..errors import BenchError
from ..options import Option, Parser, milliseconds, output, positive, seconds
from ..report import save
from ..team import Team
from . import overlap, traffic, trips
from .side import GraphSide

TEXT = (
    "Measures stream channels in CUDA graphs, with the traffic of a disaggregated model. af: the "
    "time of a micro-batch, and the spread of the time of a token. overlap: how much a loop of "
    "GEMMs and this traffic slow each other. trips: round trips of a channel, and messages of "
    "64 MiB. Other libraries move the same tensors in rows with `by`; one that does not work here "
    "is skipped. docs/benchmarks.md describes the rows. The file of --json is written after each "
    "row. The exit status is 1 if a row failed or data was wrong. It is 0 if only a target was "
    "missed."
)
MODES = ("kernel", "copy")  # of channels on GPUs
OPTIONS: tuple[Option, ...] = (
    ("--json", output, None, "also write the results to this file, as JSON"),
    ("--dry", bool, False, "on the CPU, without graphs: check the program, not the speed"),
    ("--layers", positive, 61, "number of layers"),
    ("--stages", positive, 3, "number of micro-batches"),
    ("--rows", positive, 128, "rows of a tensor"),
    ("--replays", positive, 300, "af: number of timed replays for each row"),
    ("--parts", positive, 6, "af: number of parts into which the replays are divided"),
    ("--size", positive, 8192, "overlap: size of the GEMM"),
    ("--rounds", positive, 200, "overlap: rounds, with and without traffic, for a row"),
    ("--ms", milliseconds, 30.0, "overlap: length of each part"),
    ("--seconds", seconds, 40.0, "overlap: longest time of a row"),
    ("--runs", positive, 1000, "trips: number of runs of a graph of 20 round trips"),
)
OF = {"af": ("replays", "parts"), "overlap": ("size", "rounds", "ms", "seconds")}


def _rows(args: argparse.Namespace) -> Iterator[trips.Row]:
    """Function, what differs, and seconds; what is most likely to fail comes last."""
    streams = "one" if args.dry else "two"
    if args.work == "trips":
        yield from trips.rows(args.modes, args.beside, args.runs, args.dry)
    elif args.work == "af":
        for how in ("one",) if args.dry else ("two", "one", "each"):
            for mode in args.modes:
                yield traffic.af, {"mode": mode, "streams": how}, 40
        for by in args.beside:
            yield traffic.af, {"by": by, "streams": streams}, 30
    else:
        limit = 2 * args.seconds + 40
        for mode in () if args.dry else ("none", "plain"):
            yield overlap.overlap, {"mode": mode, "compute": False}, limit
        for compute in (False, True):
            for mode in args.modes:
                yield overlap.overlap, {"mode": mode, "compute": compute}, limit
        for by in args.beside:
            yield overlap.overlap, {"by": by, "compute": True, "streams": streams}, limit


def team(shape: tuple[int, int], dry: bool, actor: type[GraphSide] = GraphSide, **how: Any) -> Team:
    """The processes; `how` is of Team."""
    count = sum(shape)
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    own = [cores[i * each : (i + 1) * each] if each >= 4 else [] for i in range(count)]
    turns = multiprocessing.RawArray("Q", count)
    made = Team(actor, shape, (dry, turns), own, **how)
    made.results()
    return made


def play(
    made: Team, function: Callable[..., Any], what: dict[str, Any], limit: float, **how: Any
) -> list[Any]:
    """Runs a function in all processes, with a cluster of nodes unless it is `by` another library;
    `how` is of Crew.cluster. After an error the processes are not used again."""
    transport = what.pop("transport", "auto")
    cluster = Crew(made.peers).cluster(transport, **how)
    with contextlib.nullcontext() if "by" in what else cluster:
        return made.call(limit, "run", function, what)


def _measured(args: argparse.Namespace) -> Generator[list[dict[str, Any]], None, None]:
    """Rows, one by one or several that belong together. Processes that have used another library
    are not used for anything else, and what has failed of a library is not tried again."""
    made, used = None, None
    gave_up: dict[tuple[Any, ...], str] = {}
    done: list[dict[str, Any]] = []
    common = {name: getattr(args, name) for name in OF.get(args.work, ())}
    if args.work != "trips":
        common["shape"] = (args.layers, args.stages, args.rows, args.width)
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
            way = by if by != "raw" else None  # what changes its process
            if made and way != used:
                made.close()
                made = None
            try:
                if not made:
                    variables = libraries.ENVIRONMENT if way and not args.dry else {}
                    made = team(args.shape, args.dry, variables=variables)
                used = way
                results = play(made, function, {**common, **what}, limit)
                row["wrong"] = sum(r["wrong"] for r in results)
                if args.work == "trips":
                    rows = trips.summary(row, results[0], done)
                else:
                    module = traffic if args.work == "af" else overlap
                    rows = [{**row, "sides": results, **module.summary(results, args)}]
                    if by:
                        del rows[0]["meets"]  # a target of ours
            except Exception as error:  # the other rows are of interest still
                if made:
                    made.close(0)
                made = None
                if by:
                    print(f"{by}: {error!r}\n{error}", file=sys.stderr, flush=True)
                    row["skipped"] = gave_up[kind] = rivals.reason(error)
                else:
                    row["error"] = traceback.format_exc()
                rows = [row]
            done += rows
            yield rows
    finally:
        if made:
            made.close()


def _print(row: dict[str, Any]) -> None:
    failed = "FAIL " if "error" in row or row.get("wrong") else ""
    shown = "  ".join(f"{k}={v}" for k, v in row.items() if k not in ("sides", "error"))
    print(f"{failed}{shown}", *([row["error"]] if "error" in row else []), sep="\n", flush=True)


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


def _parser() -> Parser:
    made = Parser(prog="fserver bench graph", description=TEXT)
    add = made.add_argument
    add("work", choices=("af", "overlap", "trips"), help="the measurement")
    for option in OPTIONS:
        made.option(*option)
    text = "width of a tensor, a multiple of 4 (default 7168)"
    add("--width", type=_width, metavar="N", default=7168, help=text)
    text = "numbers of workers and servers (default: 2x2 with 4 or more GPUs, else 1x1)"
    add("--shape", type=_shape, metavar="AxF", help=text)
    text = "modes of the channels (default: all, but host only with trips); without a name: none"
    add("--modes", nargs="*", type=mode_named, choices=trips.MODES, help=text)
    ways = libraries.ON_STREAMS
    text = "other libraries (default: all); without a name: none"
    add("--beside", nargs="*", default=ways, choices=ways, help=text)
    return made


def _parsed(argv: list[str], gpus: int) -> argparse.Namespace:
    """The options, with what was not given; refuses what does not go together."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.modes is None:
        args.modes = trips.MODES if args.work == "trips" else MODES
    if args.work != "trips" and "host" in args.modes:
        parser.error(f"--modes: 'host': want some of {', '.join(MODES)} with {args.work}")
    if args.work == "trips":
        args.shape = (1, 1)
    args.shape = args.shape or ((2, 2) if args.dry or gpus >= 4 else (1, 1))
    shared = gpus > 0 and "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if not args.dry and not shared and gpus < sum(args.shape):
        raise BenchError(
            f"torch sees {gpus} GPUs, but {sum(args.shape)} are needed (use NVIDIA's multi-process "
            "service with one GPU, which needs CUDA_MPS_PIPE_DIRECTORY, or --dry without a GPU)"
        )
    return args


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    gpus = torch.cuda.device_count()
    args = _parsed(argv, gpus)
    result: dict[str, Any] = {"arguments": vars(args), "torch": torch.__version__, "gpus": gpus}
    result["rows"] = []
    failures = 0
    with contextlib.closing(_measured(args)) as pieces:
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
