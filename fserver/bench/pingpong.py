"""`fserver bench pingpong`: round trips of the Python API, compared with the same copies in C."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from . import against, beside, report, ways
from .baseline import Baseline, baseline_of
from .crew import Case, Crew, Nodes, pair
from .errors import BenchError
from .options import (
    CHECKED,
    SHOWN,
    TRANSPORTS,
    MakeBaseline,
    choose_cores,
    exchanges,
    one_of,
    open_baseline,
    parser,
    positive,
)
from .others import reason
from .turns import CrewPlayer, Player, take_turns

SIZES = "64,4K,64K,1M,16M,64M"
OPS = ("push", "pull", "push_pull")
SMALL = 64  # bytes that a pull sends, and that the baseline sends for an answer without data


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _options(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    if options.against:
        facts["against"] = against.name(options.against)
        print(f"against {facts['against']}", flush=True)
    table = report.Table(against.COLUMNS if options.against else report.COLUMNS)
    rows: list[dict[str, Any]] = []
    print(table.header(), flush=True)
    planned = cases(options.sizes, options.ops, options.device, options.tensors)
    steps = len(options.transport) * len(planned) * options.rounds
    with report.Progress(steps, "pingpong") as bar:
        for transport in options.transport:
            play = against.run if options.against else _run
            for row in play(options, transport, planned, cores, nodes, bar):
                bar.print(table.line(row))
                rows.append(row)
    report.finish(options, "pingpong", facts, rows)
    return against.judge(options, rows) if options.against else 0


def _run(
    options: argparse.Namespace,
    transport: str,
    planned: list[Case],
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
) -> Iterator[dict[str, Any]]:
    """Measures the cases between two processes of this host, and gives each row when it is done."""
    with pair(nodes, transport, cores, device=options.device) as crew:
        yield from measure(crew, options, planned, cores, bar, nodes=nodes)


def measure(
    crew: Crew,
    options: argparse.Namespace,
    planned: list[Case],
    cores: tuple[int, int] | None,
    bar: report.Progress,
    host: str | None = None,
    make: MakeBaseline = Baseline,
    nodes: Nodes = Nodes(),  # noqa: B008 (immutable)
    names: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The same with a pair that is there, in turn with the baseline of what connects it, which
    `make` starts, and with others' ways of these names (None: as the options say): the rows of
    these follow each of ours."""
    names = options.beside if names is None else names
    gpus = crew.gpus if planned[0].device == "gpu" else None
    with contextlib.ExitStack() as stack:
        player = CrewPlayer(crew)
        if gpus:  # how that travels is known when it has
            player.prepare(planned[0])
            player.check(0)
        transport = "+".join(crew.workers("links")[0])
        way = baseline_of(transport)
        where = "{},{}".format(*crew.gpus) if way == "raw gpu" else host
        raw, says = open_baseline(stack, options, way, cores, where, make)
        room = max(max(_moved(case)) for case in planned)
        others = beside.beside(stack, names, gpus, room, cores, nodes)
        wire = _wire(gpus) if gpus and names else None
        for case in planned:
            out, back = sum(case.out), sum(case.back)
            player.prepare(case)
            rivals: list[Baseline | beside.Other] = [*([raw] if raw else []), *others]
            for one in rivals:
                one.prepare(*_moved(case))
            players: list[Player] = [*([raw] if raw else []), player, *others]
            results = take_turns(
                players, options.rounds, options.seconds, options.iters, done=bar.step
            )
            baseline = results.pop(0) if raw else []
            yield report.row(transport, case.op, out, back, results[0], baseline, **says)
            for one, figures in zip(others, results[1:], strict=True):
                if one.reason:
                    yield report.skipped(one.way, case.op, out, back, one.reason)
                else:
                    yield report.row(one.way, case.op, out, back, figures, baseline, **says)
            if wire:
                yield _wire_row(wire, case, baseline, says)


def _moved(case: Case) -> tuple[int, int]:
    """Bytes there and home of those that need an answer to know that what they sent has come."""
    return sum(case.out), sum(case.back) or SMALL


def _wire(gpus: tuple[int, int]) -> dict[str, Any]:
    """Figures of a block between two GPUs, or the reason why there are none."""
    if gpus[0] == gpus[1]:
        return {"reason": "it takes two GPUs, and there is one"}
    try:
        return beside.wire(gpus)
    except BenchError as error:
        print(f"bench: wire: {error}", file=sys.stderr, flush=True)
        return {"reason": reason(error)}


def _wire_row(
    wire: dict[str, Any], case: Case, baseline: list[dict[str, Any]], says: dict[str, Any]
) -> dict[str, Any]:
    """What the bytes of a case take at the speed of a block."""
    out, back = sum(case.out), sum(case.back)
    if "reason" in wire:
        return report.skipped("wire", case.op, out, back, wire["reason"])
    share = (out + back) / ways.BIG
    figures = {"iters": wire["iters"], **{k: share * wire[k] for k in ("p50_us", "p99_us")}}
    return report.row("wire", case.op, out, back, [figures], baseline, **says)


def cases(
    sizes: list[tuple[int, int]], ops: list[str], device: str = "cpu", tensors: int = 1
) -> list[Case]:
    """Each size, there and home, with every op, each under keys of its own. A push and an answer
    have as many tensors of that size as `tensors` says."""
    shapes = [(op, *size) for size in sizes for op in ops]
    return [
        Case(
            op,
            (SMALL if op == "pull" else out,) * tensors,
            () if op == "push" else (back,) * tensors,
            index * tensors,
            device=device,
        )
        for index, (op, out, back) in enumerate(shapes)
    ]


def _options(argv: list[str]) -> argparse.Namespace:
    """The options, checked, with defaults that depend on others."""
    made = _parser()
    options = made.parse_args(argv)
    if options.against:
        made.set_defaults(rounds=against.ROUNDS)
        options = made.parse_args(argv)
        if options.beside or options.plot:
            made.error("--against cannot be combined with --beside or --plot")
        against.check(options.against, options.rounds)
    if options.beside is None:
        options.beside = ways.ON_GPUS if options.device == "gpu" else ()
    return options


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "pingpong",
        "Measures push_pull and wait between a worker and a server: two processes, each on a "
        "core of its own. In turn with them, two processes in C move the same bytes on the same "
        "cores (the columns raw). For tcp they use a socket, for cma process_vm_writev and a "
        "flag in shared memory, for cudaipc the copy engine and a flag in host memory. The "
        "figures are medians over the rounds. GB/s counts the bytes of both directions. The "
        f"ratio is p50 divided by raw p50. {CHECKED} With tensors on GPUs, the numbers in the "
        "answers to push and pull are checked between rounds only. Other libraries take turns "
        "too, in processes of their own on the same GPUs. They wait for their stream at each "
        "round trip. With tensors on GPUs, they are NCCL's send and recv, torch's symmetric "
        "memory with its own kernels and with NVSHMEM, and NIXL. With tensors on the CPU, it is "
        f"gloo. With these libraries, the answer to a push has {SMALL} B. A library that is "
        "missing or fails is skipped with the reason. The row wire shows how long the same "
        "bytes take at the speed of a copy of 64 MiB by the copy engine.",
        seconds=(0.2, "approximate length of a round of each way"),
        transport=None,
        rounds=7,
    )
    made.add_argument(
        "--transport",
        type=lambda text: text.split(","),
        default="auto",
        metavar="LIST",
        help=f"the transports, measured one after the other: {TRANSPORTS} {SHOWN}",
    )
    made.add_argument(
        "--against",
        type=against.checkout,
        metavar="DIR",
        help="compare with another checkout of fserver whose extension is built, instead of the "
        f"baseline and other libraries, by {against.ROUNDS} rounds of each. Prints the median of "
        "the ratios of this build's p50 to the other's, and its 95 %% interval (by order "
        f"statistics). The exit status is 1 if a whole interval is above {against.LIMIT}",
    )
    made.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where the tensors are. gpu: the worker's on the first GPU, the server's on the last "
        f"{SHOWN}",
    )
    made.add_argument(
        "--sizes",
        type=exchanges,
        default=SIZES,
        metavar="LIST",
        help=f"sizes in bytes, for both directions or as OUT:BACK (default {SIZES})",
    )
    made.add_argument(
        "--tensors",
        type=positive,
        default=1,
        metavar="N",
        help=f"number of tensors of that size in each push and in each answer {SHOWN}",
    )
    made.add_argument(
        "--ops",
        type=one_of(OPS),
        default=",".join(OPS),
        metavar="LIST",
        help=f"operations to measure {SHOWN}",
    )
    beside.add_option(made, f"{','.join(ways.ON_GPUS)} for tensors on GPUs, else none")
    return made
