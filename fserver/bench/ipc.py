"""`fserver bench ipc`: all transports inside a host, side by side."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from . import report
from .baseline import HOST_WAYS, OF_TRANSPORT, Baseline
from .crew import Case, Crew, Nodes, pair
from .errors import BenchError
from .options import CHECKED, choose_cores, open_baseline, parser, sizes
from .pingpong import SMALL, cases
from .turns import CrewPlayer, take_turns

SIZES = "64,512,4K,32K,256K,1M,4M,16M,64M"
SHARED_SIZES = "64K,1792K,16M"
SHARED = "cma shared"
TRANSPORTS = ("tcp", "cma")  # that take tensors in host memory


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    table, rows = report.Table(), []
    print(table.header(), flush=True)
    chosen = list(TRANSPORTS) if options.transport == "auto" else [options.transport]
    with contextlib.ExitStack() as stack:
        lends = "cma" in chosen
        steps = len(options.sizes) + lends * len(options.shared_sizes)
        bar = stack.enter_context(report.Progress(steps * options.rounds, "ipc"))
        players: dict[str, CrewPlayer | Baseline] = {}
        reasons: dict[str, str] = {}
        says: dict[str, dict[str, Any]] = {}
        for transport in chosen:
            try:
                players[transport] = CrewPlayer(_open(stack, nodes, transport, cores))
            except BenchError as error:
                reasons[transport] = error.reason
        for way in HOST_WAYS:
            raw, says[way] = open_baseline(stack, options, way, cores)
            if raw:
                players[way] = raw
        for case in cases([(n, n) for n in options.sizes], ["push_pull"]):
            (out,), (back,) = case.out, case.back
            for player in players.values():
                if isinstance(player, CrewPlayer):
                    player.prepare(case)
                else:
                    player.prepare(out, back)
            results = take_turns(
                list(players.values()),
                options.rounds,
                options.seconds,
                options.iters,
                done=bar.step,
            )
            found = dict(zip(players, results, strict=True))
            for way in [*chosen, *(way for way in HOST_WAYS if way in found)]:
                moved = (way, "push_pull", out, back)
                if way in reasons:
                    row = report.skipped(*moved, reasons[way])
                elif way in HOST_WAYS:
                    row = report.row(*moved, found[way], [])
                else:
                    raw_way = OF_TRANSPORT[way]
                    row = report.row(*moved, found[way], found.get(raw_way, []), **says[raw_way])
                bar.print(table.line(row))
                rows.append(row)
        for row in _shared(stack, options, nodes, cores, players, reasons, bar) if lends else []:
            bar.print(table.line(row))
            rows.append(row)
    report.finish(options, "ipc", facts, rows)
    return 0


def _shared(
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    nodes: Nodes,
    cores: tuple[int, int] | None,
    players: dict[str, CrewPlayer | Baseline],
    reasons: dict[str, str],
    bar: report.Progress,
) -> Iterator[dict[str, Any]]:
    """Rows of pushes with a small answer, of shared tensors and of others in turn."""
    ways = {"cma": False, SHARED: True}
    pairs: dict[str, CrewPlayer] = {}
    cma = players.get("cma")
    if isinstance(cma, CrewPlayer):
        pairs["cma"] = cma
        pairs[SHARED] = CrewPlayer(_open(stack, nodes, "cma", cores))
    for key, size in enumerate(options.shared_sizes, len(options.sizes)):
        if not pairs:
            yield from (report.skipped(w, "pull", size, SMALL, reasons["cma"]) for w in ways)
            continue
        for way, player in pairs.items():
            player.prepare(Case("pull", (size,), (SMALL,), key, shared=ways[way]))
        results = take_turns(
            list(pairs.values()), options.rounds, options.seconds, options.iters, done=bar.step
        )
        for way, figures in zip(pairs, results, strict=True):
            yield report.row(way, "pull", size, SMALL, figures, [])


def _open(
    stack: contextlib.ExitStack, nodes: Nodes, transport: str, cores: tuple[int, int] | None
) -> Crew:
    """A pair that uses this transport and no other.

    Raises:
        BenchError: it cannot be had.
    """
    with contextlib.ExitStack() as own:
        crew = own.enter_context(pair(nodes, transport, cores))
        links = crew.workers("links")[0]
        if links != [transport]:
            raise BenchError(f"{transport} was asked for, but the pair uses {'+'.join(links)}")
        stack.enter_context(own.pop_all())
    return crew


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "ipc",
        "Measures push_pull and wait between two processes of this host over each transport. In "
        "turn with them it measures programs in C on the same cores: raw tcp (a socket), raw "
        "cma (process_vm_writev and a flag in shared memory) and raw shm (a copy into shared "
        "memory, which is read in place, and a flag). The ratio compares a transport with the "
        "raw program that does the same. A transport that does not work here is skipped with "
        f"the reason. {CHECKED} At the end, it measures cma with a small answer: the push of a "
        "normal tensor, and of a shared tensor, whose bytes are not copied.",
        seconds=(0.2, "approximate length of a round of each transport"),
        transport="auto",
        rounds=5,
    )
    made.add_argument(
        "--sizes",
        type=sizes,
        default=SIZES,
        metavar="LIST",
        help=f"sizes in bytes, in each direction (default {SIZES})",
    )
    made.add_argument(
        "--shared-sizes",
        type=sizes,
        default=SHARED_SIZES,
        metavar="LIST",
        help=f"sizes in bytes of the push of a shared tensor (default {SHARED_SIZES})",
    )
    return made
