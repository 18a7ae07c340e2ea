"""`fserver bench graph`: measures stream channels in CUDA graphs."""

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch

from fserver.channel.describe import mode_named

from .. import libraries, rivals
from ..crew import Crew
from ..errors import BenchError
from ..options import ON_STREAMS, Option, Parser, milliseconds, output, positive, seconds
from ..report import save
from ..team import Team
from . import overlap, traffic, trips
from .side import GraphSide

TEXT = (
    "Measures stream channels in CUDA graphs, with the traffic of a disaggregated model, and other "
    "libraries that move the same bytes (rows with `by`; one that does not work here is skipped). "
    "docs/benchmarks.md describes the rows. The exit status is 1 if a row failed or data was wrong."
)
WORKS: dict[str, Any] = {"af": traffic, "overlap": overlap, "trips": trips}
MODES = ("kernel", "copy")  # of channels on GPUs; the rest of trips is of mode host
OPTIONS: tuple[Option, ...] = (
    ("--json", output, None, "also write the results to this file, as JSON, after each row"),
    ("--dry", bool, False, "on the CPU, without graphs: check the program, not the speed"),
    ("--workers", positive, None, "number of workers (default: 2 with 4 or more GPUs, else 1)"),
    ("--servers", positive, None, "number of servers (default: the same as workers)"),
    ("--layers", positive, 61, "number of layers"),
    ("--stages", positive, 3, "number of micro-batches"),
    ("--rows", positive, 128, "rows of a tensor"),
    ("--width", positive, 7168, "width of a tensor, a multiple of 4"),
    ("--replays", positive, 300, "af: number of timed replays for each row"),
    ("--size", positive, 8192, "overlap: size of the GEMM"),
    ("--rounds", positive, 200, "overlap: rounds, with and without traffic, for a row"),
    ("--ms", milliseconds, 30.0, "overlap: length of each part"),
    ("--seconds", seconds, 40.0, "overlap: longest time of a row"),
    ("--runs", positive, 1000, "trips: number of runs of a graph of 20 round trips"),
)


def team(shape: tuple[int, int], dry: bool, actor: type[GraphSide] = GraphSide, **how: Any) -> Team:
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
    """Yields rows, one by one or several that belong together. Processes that have used another
    library are not used for anything else, and what has failed of a library is not tried again."""
    made, used, work = None, None, WORKS[args.work]
    gave_up: dict[tuple[Any, ...], str] = {}
    try:
        for function, what, limit in work.rows(args):
            row, by = {"work": args.work, **what}, what.get("by")
            kind, way = (by, what.get("how")), by if by != "raw" else None
            if by and args.dry and by != "nccl":
                gave_up[kind] = "it takes GPUs"
            if kind in gave_up:
                yield [{**row, "skipped": gave_up[kind]}]
                continue
            if made and way != used:
                made.close()
                made = None
            try:
                if not made:
                    variables = libraries.ENVIRONMENT if way and not args.dry else {}
                    made, used = (
                        team((args.workers, args.servers), args.dry, variables=variables),
                        way,
                    )
                results = play(made, function, what, limit)
                wrong = {"wrong": sum(r["wrong"] for r in results)}
                rows = [{**row, **one, **wrong} for one in work.summary(results, args)]
            except Exception as error:  # the other rows are of interest still
                if made:
                    made.close(0)
                made = None
                if by:
                    print(f"{by}: {error!r}\n{error}", file=sys.stderr, flush=True)
                    gave_up[kind] = rivals.reason(error)
                    rows = [{**row, "skipped": gave_up[kind]}]
                else:
                    rows = [{**row, "error": traceback.format_exc()}]
            yield rows
    finally:
        if made:
            made.close()


def _parsed(argv: list[str], gpus: int) -> argparse.Namespace:
    """The options, with defaults that depend on others."""
    parser = Parser(prog="fserver bench graph", description=TEXT)
    parser.add_argument("work", choices=WORKS, help="see docs/benchmarks.md")
    for option in OPTIONS:
        parser.option(*option)
    text = "modes of the channels (default: all, but host only with trips); without a name: none"
    modes = (*MODES, "host")
    parser.add_argument("--modes", nargs="*", type=mode_named, choices=modes, help=text)
    ways, text = ON_STREAMS, "other libraries (default: all); without a name: none"
    parser.add_argument("--beside", nargs="*", default=ways, choices=ways, help=text)
    args = parser.parse_args(argv)
    if args.modes is None:
        args.modes = modes if args.work == "trips" else MODES
    if args.work != "trips" and "host" in args.modes:
        parser.error(f"--modes: 'host': want some of {', '.join(MODES)} with {args.work}")
    if args.work == "trips":
        args.workers = args.servers = 1
    args.workers = args.workers or (2 if gpus >= 4 else 1)
    args.servers = args.servers or args.workers
    args.sizes = [(args.rows * args.width, 2 * args.rows * args.width)] * args.stages
    want, shared = args.workers + args.servers, "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if not args.dry and gpus < (1 if shared else want):
        raise BenchError(f"torch sees {gpus} GPUs, want {want} (or CUDA's MPS, or --dry)")
    return args


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    gpus = torch.cuda.device_count()
    args = _parsed(argv, gpus)
    result: dict[str, Any] = {"arguments": vars(args), "torch": torch.__version__, "gpus": gpus}
    result["rows"] = []
    failures = 0
    with contextlib.closing(_measured(args)) as found:
        for rows in found:
            failed = any("error" in row or row.get("wrong") for row in rows)
            failures += failed
            for row in rows:
                shown = "  ".join(f"{k}={v}" for k, v in row.items() if k not in ("sides", "error"))
                print(("FAIL " if failed else "") + shown, flush=True)
                if "error" in row:
                    print(row["error"], flush=True)
            result["rows"] += rows
            if args.json:
                save(args.json, result)
            if failures == 2:
                break
    return 1 if failures else 0
