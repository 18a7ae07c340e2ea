"""`fserver bench matrix`: all places, operations and devices."""

import argparse
import contextlib
import functools
import socket
import sys
from collections.abc import Iterator
from typing import Any

from . import beside, report, ways
from .baseline import Baseline
from .crew import Case, Crew, Member, Nodes, pair, start
from .joint import joint
from .options import CHECKED, choose_cores, exchanges, one_of, parser
from .pingpong import OPS, cases, measure
from .remote import far_baseline

PLACES = ("local", "remote", "joint")
DEVICES = ("cpu", "gpu")
NO_ADDRESS = "this host has only a loopback address (use two hosts, --scheduler and --role)"
TWO_HOSTS = "between two hosts, only CPU tensors are measured"
COLUMNS = (
    report.Column("place", -6, "place", str),
    report.Column("device", -6, "device", str),
    *report.COLUMNS,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    made = _parser()
    options = made.parse_args(argv)
    if options.beside is None:
        options.beside = ways.ON_GPUS
    if bool(options.scheduler) != bool(options.role):
        made.error(
            "--scheduler and --role: give both, or neither (run one command on each of two hosts)"
        )
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    if options.role == "server":
        return _serve(options, cores, nodes)
    if options.role:
        options.places = ["remote"]
    planned = cases(options.sizes, options.ops)
    table, rows = report.Table(COLUMNS), []
    print(table.header(), flush=True)
    total = len(DEVICES) * len(options.places) * len(planned) * options.rounds
    with report.Progress(total, "matrix") as bar:
        for row in _run(options, planned, cores, nodes, bar):
            bar.print(table.line(row))
            rows.append(row)
    report.finish(options, "matrix", facts, rows)
    return 0


def _run(
    options: argparse.Namespace,
    planned: list[Case],
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
) -> Iterator[dict[str, Any]]:
    for place in options.places:
        through_itself = place == "remote" and not options.role
        host = own_address() if through_itself else None
        if through_itself and not host:
            reasons = {"cpu": NO_ADDRESS, "gpu": NO_ADDRESS}
        else:
            reasons = {}
            with _crew(options, place, "cpu", host, cores, nodes) as crew:
                refused = crew.one("worker", "problem", {"STEPMESH_BACKEND": "GPU"})
                make = functools.partial(far_baseline, crew) if options.role else Baseline
                names = _beside(options, place, "cpu")
                for row in measure(
                    crew, options, planned, cores, bar, host, make, nodes, names=names
                ):
                    yield {"place": place, "device": "cpu", **row}
            if refused or options.role:
                reasons["gpu"] = refused or TWO_HOSTS
            else:
                on_gpus = cases(options.sizes, options.ops, "gpu")
                with _crew(options, place, "gpu", host, cores, nodes) as crew:
                    names = _beside(options, place, "gpu")
                    for row in measure(
                        crew, options, on_gpus, cores, bar, host, nodes=nodes, names=names
                    ):
                        yield {"place": place, "device": "gpu", **row}
        for device, reason in reasons.items():
            for case in planned:
                moved = (options.transport, case.op, sum(case.out), sum(case.back))
                yield report.skipped(*moved, reason, place=place, device=device)
                for _ in range(options.rounds):
                    bar.step()


@contextlib.contextmanager
def _crew(
    options: argparse.Namespace,
    place: str,
    device: str,
    host: str | None,
    cores: tuple[int, int] | None,
    nodes: Nodes,
) -> Iterator[Crew]:
    """The worker, and the server if it is on this host."""
    if options.role:
        member = Member("worker", "remote.CommandingWorker", "worker", cores and cores[0])
        with start([member], nodes) as crew:
            with crew.cluster("tcp", host=options.host, scheduler=options.scheduler):
                yield crew
    elif place == "joint":
        with joint(options.transport, cores, device) as crew:
            yield crew
    else:
        transport = "tcp" if place == "remote" else options.transport
        with pair(nodes, transport, cores, host, device=device) as crew:
            yield crew


def _beside(options: argparse.Namespace, place: str, device: str) -> list[str]:
    """Others' ways that do the same: they have two processes of this host, and two GPUs."""
    able = ways.ON_GPUS if device == "gpu" else ways.ON_CPU
    return [way for way in options.beside if way in able and place == "local"]


def _serve(options: argparse.Namespace, cores: tuple[int, int] | None, nodes: Nodes) -> int:
    """The server of two hosts."""
    member = Member("server", "remote.ObeyingServer", "server", cores and cores[1])
    print(f"bench: the server waits for the worker at {options.scheduler}", file=sys.stderr)
    with start([member], nodes) as crew:
        with crew.cluster("tcp", host=options.host, scheduler=options.scheduler):
            crew.all("serve", timeout=24 * 3600)
    return 0


def own_address() -> str | None:
    """An IPv4 address of this host that is not loopback: the one that routes out. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "matrix",
        "Measures pushes and pulls between a worker and a server, in turn with the raw "
        "baseline. There are three places. local: two processes of this host, over --transport. "
        "remote: over TCP, either through an address of this host that is not loopback (the "
        "kernel still keeps the traffic inside the host), or between two hosts. For two hosts, "
        "run the command on both, with --role and with --scheduler HOST:PORT, an address of the "
        f"server's host. joint: a pair that DMLC_ROLE=joint starts, over --transport. {CHECKED} "
        "In place local, other libraries take turns too, as in `fserver bench pingpong`. "
        "Between two hosts, the baseline has a process on each host. The one on the server's "
        "host listens on the address of fserver's server, on any free port, for at most ten "
        "seconds. It accepts only a client that sends a token, which the two sides have "
        "exchanged over fserver. The traffic of the baseline is not encrypted.",
        seconds=(0.2, "approximate length of a round of each way"),
        transport="auto",
        rounds=5,
    )
    add = made.add_argument
    add(
        "--sizes",
        type=exchanges,
        default="4K,1M",
        metavar="LIST",
        help="sizes in bytes, for both directions or as OUT:BACK (default 4K,1M)",
    )
    for name, allowed in (("places", PLACES), ("ops", OPS)):
        text = ",".join(allowed)
        shown = f"{name} to measure (default {text})"
        add(f"--{name}", type=one_of(allowed), default=text, metavar="LIST", help=shown)
    beside.add_option(made, f"{','.join(ways.ON_GPUS)}; gloo is for tensors on the CPU")
    add("--scheduler", metavar="HOST:PORT", help="two hosts: an address of the server's host")
    add("--role", choices=("worker", "server"), help="two hosts: the role of this host")
    add("--host", metavar="ADDRESS", help="two hosts: the address of this host to use")
    return made
