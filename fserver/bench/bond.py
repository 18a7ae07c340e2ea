"""`fserver bench bond`: one connection over several interfaces, RDMA devices or queue pairs."""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import options as opts
from . import report
from .actors import WorkerActor
from .crew import Case, Crew, Member, Nodes, pair_of, start
from .errors import BenchError
from .remote import CommandingWorker
from .run import Run
from .turns import CrewPlayer, take_turns

LAGS = ("0", "1", "port1", "port2")
COLUMNS = (
    report.Column("over", -24, "over"),
    report.Column("bytes", 8, "bytes_out", report.show_size),
    *report.TIMES,
    report.SPEED,
    report.RATIO,
    report.Column("share of each", -40, "members", lambda members: show(members)),
)
PATIENCE = 5.0  # seconds until all members are connected
PARSER = opts.parser(
    "bond",
    "Measures push_pulls between two processes whose connection is made of several: network "
    "interfaces, RDMA devices, or queue pairs over a bonded NIC. Prints the round trip, the ratio "
    "to the first line of that size, and which share of the bytes each part of the connection has "
    f"carried. The ways take turns. {opts.CHECKED} For two hosts, run the command on both, with "
    "the same options.",
    ("--interfaces", opts.names, None, "network interfaces of the worker, for TCP"),
    ("--server-interfaces", opts.names, None, "those of the server (default: the same)"),
    ("--devices", opts.names, None, "RDMA devices of the worker"),
    ("--server-devices", opts.names, None, "those of the server (default: the same)"),
    ("--pairs", opts.numbers, "1,2,4", "queue pairs over each device"),
    ("--lag", opts.some_of(LAGS), "0", f"of STEPMESH_SPLIT_QP_LAG, of {', '.join(LAGS)}"),
    ("--sizes", opts.sizes, "4K,1M,16M", "bytes each way"),
    ("--rounds", opts.positive, 5, "number of rounds"),
    ("--iters", opts.positive, None, "exchanges in a round, instead of --seconds"),
    opts.seconds_of(0.2, "approximate length of a round, for each way and size"),
    *opts.TWO_HOSTS,
)


class Way(NamedTuple):
    """What the two sides use, and the settings of each role."""

    name: str
    worker: Mapping[str, str]
    server: Mapping[str, str]


class Members(WorkerActor):
    """A worker that knows what its connection is made of."""

    def whole(self) -> None:
        """Waits until each member is connected, for a while."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(m["reason"] for m in self.members()):
            time.sleep(0.01)

    def members(self) -> list[dict[str, Any]]:
        """The members of the connection to the server; none if it is not made of several."""
        return [m._asdict() for m in self.nodes[0].links()[0].members]


class FarMembers(Members, CommandingWorker):
    """Its server is on another host."""


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    if bool(options.interfaces) == bool(options.devices):
        PARSER.error("give either --interfaces (TCP) or --devices (RDMA)")
    opts.check_hosts(PARSER, options)
    compared = ways(options)
    with Run("bond", options, nodes, COLUMNS, options.rounds * len(compared)) as run:
        if options.role == "server":
            _serve(run, compared)
            return 0
        run.header()
        for row in _rows(run, compared):
            run.add(row)
        run.finish()
    return 0


def ways(options: argparse.Namespace) -> list[Way]:
    """What is compared, the baseline first."""
    if options.interfaces:
        theirs = options.server_interfaces or options.interfaces
        both = [(options.interfaces[:1], theirs[:1]), (options.interfaces, theirs)]
        return [
            Way("+".join(mine), *({"DMLC_INTERFACE": ",".join(each)} for each in (mine, others)))
            for mine, others in both
        ]
    theirs = options.server_devices or options.devices
    found = []
    for lag, pairs in itertools.product(options.lag, options.pairs):
        name = f"{'+'.join(options.devices)} x {pairs}" + (f", lag {lag}" if lag != "0" else "")
        common = {"STEPAF_QP_NUM": str(pairs), "STEPMESH_SPLIT_QP_LAG": lag}
        mine, others = (
            {**common, "FSERVER_RDMA_DEVICE": ",".join(each)} for each in (options.devices, theirs)
        )
        found.append(Way(name, mine, others))
    return found


def transport(options: argparse.Namespace) -> str:
    """What carries the bytes."""
    return "tcp" if options.interfaces else "verbs"


def address(interface: str) -> str:
    """The IPv4 address of a network interface of this host."""
    import psutil

    for found in psutil.net_if_addrs().get(interface, []):
        if found.family.name == "AF_INET":
            return str(found.address)
    raise BenchError(f"--interfaces: {interface} has no IPv4 address (ip addr shows them)")


def show(members: list[dict[str, Any]]) -> str:
    """ "eth0 51 %, eth1 49 %"; with the port of a bond, if it is known."""
    parts = []
    for member in members:
        _, _, port = member["transport"].partition("/")
        text = f"{member['interface']} {member['share']:.0f} %"
        parts.append(f"{text} ({port})" if port.startswith("port") else text)
    return ", ".join(parts) or "-"


def _rows(run: Run, compared: list[Way]) -> Iterator[dict[str, Any]]:
    """A cluster for each way and round, in the same two processes."""
    options = run.options
    worker, server = pair_of(run.cores, FarMembers if options.role else Members)
    crew = run.enter_context(start([worker] if options.role else [worker, server], run.nodes))
    results: dict[tuple[int, int], list[tuple[report.Figures, list[dict[str, Any]]]]] = {}
    for _, at in itertools.product(range(options.rounds), range(len(compared))):
        for size, found in _round(crew, compared[at], options):
            results.setdefault((size, at), []).append(found)
        run.step()
    for (size, at), rounds in sorted(results.items()):
        measured = [figures for figures, _ in rounds]
        first = [figures for figures, _ in results[size, 0]]
        how = transport(options), "push_pull", size, size
        yield {
            **report.row(*how, measured, first),
            "over": compared[at].name,
            "baseline": compared[0].name,
            "members": shares([m for _, m in rounds]),
        }


def _round(
    crew: Crew, way: Way, options: argparse.Namespace
) -> Iterator[tuple[int, tuple[report.Figures, list[dict[str, Any]]]]]:
    """Of each size, the figures of a round and what each member has sent in it."""
    with _cluster(crew, way, options):
        crew.one("worker", "whole")
        player = CrewPlayer(crew)
        for size in options.sizes:
            player.prepare(Case("push_pull", (size,), (size,)))
            before = crew.one("worker", "members")
            [[figures]] = take_turns([player], 1, options.seconds, options.iters)
            after = zip(before, crew.one("worker", "members"), strict=True)
            sent = [{**now, "sent": now["sent"] - then["sent"]} for then, now in after]
            yield size, (figures, sent)


def _cluster(
    crew: Crew, way: Way, options: argparse.Namespace
) -> contextlib.AbstractContextManager[None]:
    near = way.server.get("DMLC_INTERFACE", "").split(",")[0]
    return crew.cluster(
        transport(options),
        scheduler=options.scheduler,
        host=options.host,
        near=address(near) if near and not options.scheduler else None,
        by_role={"worker": way.worker, "server": way.server},
    )


def _serve(run: Run, compared: list[Way]) -> None:
    """The server of two hosts: a cluster for each one of the worker's, in the same order."""
    options = run.options
    member = Member("server", "remote.ObeyingServer", "server", run.cores and run.cores[1])
    print(f"bench: the server waits for the worker at {options.scheduler}", file=sys.stderr)
    with start([member], run.nodes) as crew:
        for _, way in itertools.product(range(options.rounds), compared):
            with _cluster(crew, way, options):
                crew.all("serve", timeout=24 * 3600)


def shares(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The members with their percentage of the bytes of all rounds."""
    total = sum(member["sent"] for members in rounds for member in members) or 1
    found = []
    for i, last in enumerate(rounds[-1]):
        sent = sum(members[i]["sent"] for members in rounds)
        found.append({**last, "sent": sent, "share": 100 * sent / total})
    return found
