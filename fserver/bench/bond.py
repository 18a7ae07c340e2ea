"""`fserver bench bond`: one connection over several interfaces, RDMA devices or queue pairs."""

import argparse
import contextlib
import fcntl
import itertools
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import peers, report
from .crew import Case, Crew, Member, Nodes, start
from .errors import BenchError
from .options import CHECKED, SHOWN, choose_cores, numbers, one_of, parser, positive, sizes
from .remote import CommandingWorker
from .turns import CrewPlayer, take_turns

LAGS = ("0", "1", "port1", "port2")
COLUMNS = (
    report.Column("over", -24, "over", str),
    report.Column("bytes", 8, "bytes_out", report.show_size),
    *report.TIMES,
    report.SPEED,
    report.RATIO,
    report.Column("share of each", -40, "members", lambda members: show(members)),
)
SIOCGIFADDR = 0x8915
PATIENCE = 5.0  # seconds until all members are connected


class Way(NamedTuple):
    """What the two sides use, and the settings of each role."""

    name: str
    worker: Mapping[str, str]
    server: Mapping[str, str]


class Members(peers.WorkerPart):
    """A worker that knows what its connection is made of."""

    def whole(self) -> None:
        """Waits until each member is connected, for a while."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(m["reason"] for m in self.members()):
            time.sleep(0.01)

    def members(self) -> list[dict[str, Any]]:
        """The members of the connection to the server; none if it is not made of several."""
        return [m._asdict() for m in self.nodes[0].links()[0].members]


class BondWorker(Members):
    """Its server is on this host."""


class FarBondWorker(Members, CommandingWorker):
    """Its server is on another host."""


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    made = _parser()
    options = made.parse_args(argv)
    if bool(options.interfaces) == bool(options.devices):
        made.error("give either --interfaces (TCP) or --devices (RDMA)")
    if bool(options.scheduler) != bool(options.role):
        made.error(
            "--scheduler and --role: give both, or neither (run one command on each of two hosts)"
        )
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    compared = ways(options)
    if options.role == "server":
        return _serve(options, compared, cores, nodes)
    table = report.Table(COLUMNS)
    print(table.header(), flush=True)
    rows = []
    for row in _run(options, compared, cores, nodes):
        print(table.line(row), flush=True)
        rows.append(row)
    report.finish(options, "bond", facts, rows)
    return 0


def ways(options: argparse.Namespace) -> list[Way]:
    """What is compared, the baseline first."""
    if options.interfaces:
        theirs = options.server_interfaces or options.interfaces
        return [
            _over_tcp(options.interfaces[:1], theirs[:1]),
            _over_tcp(options.interfaces, theirs),
        ]
    theirs = options.server_devices or options.devices
    return [
        _over_verbs(options.devices, theirs, pairs, lag)
        for lag, pairs in itertools.product(options.lag, options.pairs)
    ]


def _over_tcp(ours: list[str], theirs: list[str]) -> Way:
    settings = {"FSERVER_TRANSPORT": "tcp"}
    return Way(
        "+".join(ours),
        {**settings, "DMLC_INTERFACE": ",".join(ours)},
        {**settings, "DMLC_INTERFACE": ",".join(theirs)},
    )


def _over_verbs(ours: list[str], theirs: list[str], pairs: int, lag: str) -> Way:
    settings = {
        "FSERVER_TRANSPORT": "verbs",
        "STEPAF_QP_NUM": str(pairs),
        "STEPMESH_SPLIT_QP_LAG": lag,
    }
    return Way(
        f"{'+'.join(ours)} x {pairs}" + (f", lag {lag}" if lag != "0" else ""),
        {**settings, "FSERVER_RDMA_DEVICE": ",".join(ours)},
        {**settings, "FSERVER_RDMA_DEVICE": ",".join(theirs)},
    )


def address(interface: str) -> str:
    """The IPv4 address of a network interface of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            found = fcntl.ioctl(asker, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise BenchError(
                f"--interfaces: {interface} has no IPv4 address: {error.strerror} (ip addr shows "
                "the interfaces)"
            ) from None
    return socket.inet_ntoa(found[20:24])


def show(members: list[dict[str, Any]]) -> str:
    """ "eth0 51 %, eth1 49 %"; with the port of a bond, if it is known."""
    parts = []
    for member in members:
        _, _, port = member["transport"].partition("/")
        text = f"{member['interface']} {member['share']:.0f} %"
        parts.append(f"{text} ({port})" if port.startswith("port") else text)
    return ", ".join(parts) or "-"


def _run(
    options: argparse.Namespace,
    compared: list[Way],
    cores: tuple[int, int] | None,
    nodes: Nodes,
) -> Iterator[dict[str, Any]]:
    """A cluster for each way and round, in the same two processes."""
    worker_core, server_core = cores or (None, None)
    members = [
        Member("worker", "bond.BondWorker", "worker", worker_core),
        Member("server", "peers.ServerPart", "server", server_core),
    ]
    if options.role:
        members = [Member("worker", "bond.FarBondWorker", "worker", worker_core)]
    results: dict[tuple[int, int], list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    with start(members, nodes) as crew:
        turns = itertools.product(range(options.rounds), range(len(compared)))
        for _, at in turns:
            for size, found in _round(crew, compared[at], options):
                results.setdefault((size, at), []).append(found)
    for (size, at), rounds in sorted(results.items()):
        measured = [figures for figures, _ in rounds]
        first = [figures for figures, _ in results[size, 0]]
        transport = compared[at].worker["FSERVER_TRANSPORT"]
        row = report.row(transport, "push_pull", size, size, measured, first, compared[0].name)
        yield {**row, "over": compared[at].name, "members": shares([m for _, m in rounds])}


def _round(
    crew: Crew, way: Way, options: argparse.Namespace
) -> Iterator[tuple[int, tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """Of each size, the figures of a round and what each member has sent in it."""
    with _cluster(crew, way, options):
        crew.one("worker", "whole")
        player = CrewPlayer(crew)
        for size in options.sizes:
            player.prepare(Case("push_pull", (size,), (size,)))
            before = crew.one("worker", "members")
            [[figures]] = take_turns([player], 1, options.seconds, options.iters)
            after = crew.one("worker", "members")
            sent = [
                {**now, "sent": now["sent"] - then["sent"]}
                for then, now in zip(before, after, strict=True)
            ]
            yield size, (figures, sent)


def _cluster(
    crew: Crew, way: Way, options: argparse.Namespace
) -> contextlib.AbstractContextManager[None]:
    near = way.server.get("DMLC_INTERFACE", "").split(",")[0]
    return crew.cluster(
        way.worker["FSERVER_TRANSPORT"],
        scheduler=options.scheduler,
        near=address(near) if near and not options.scheduler else None,
        by_role={"worker": way.worker, "server": way.server},
    )


def _serve(
    options: argparse.Namespace, compared: list[Way], cores: tuple[int, int] | None, nodes: Nodes
) -> int:
    """The server of two hosts: a cluster for each one of the worker's, in the same order."""
    member = Member("server", "remote.ObeyingServer", "server", cores and cores[1])
    print(f"bench: the server waits for the worker at {options.scheduler}", file=sys.stderr)
    with start([member], nodes) as crew:
        for _, way in itertools.product(range(options.rounds), compared):
            with _cluster(crew, way, options):
                crew.all("serve", timeout=24 * 3600)
    return 0


def shares(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The members with their percentage of the bytes of all rounds."""
    total = sum(member["sent"] for members in rounds for member in members) or 1
    found = []
    for i, last in enumerate(rounds[-1]):
        sent = sum(members[i]["sent"] for members in rounds)
        found.append({**last, "sent": sent, "share": 100 * sent / total})
    return found


def _names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "bond",
        "Measures push_pulls between two processes whose connection is made of several: network "
        "interfaces, RDMA devices, or queue pairs over a bonded NIC. Prints the round trip, the "
        "ratio to the first line of that size, and which share of the bytes each part of the "
        f"connection has carried. The ways take turns. {CHECKED} For two hosts, run the command on "
        "both, with the same options, --role, and --scheduler HOST:PORT, an address of the "
        "server's host.",
        seconds=(0.2, "approximate length of a round, for each way and size"),
        transport=None,
    )
    add = made.add_argument
    add("--rounds", type=positive, default=5, help=f"number of rounds {SHOWN}")
    add("--iters", type=positive, metavar="N", help="make N exchanges a round, not --seconds")
    add(
        "--interfaces", type=_names, metavar="A,B", help="network interfaces of the worker, for TCP"
    )
    add(
        "--server-interfaces",
        type=_names,
        metavar="A,B",
        help="those of the server (default: the same)",
    )
    add("--devices", type=_names, metavar="A,B", help="RDMA devices of the worker")
    add(
        "--server-devices",
        type=_names,
        metavar="A,B",
        help="those of the server (default: the same)",
    )
    add(
        "--pairs",
        type=numbers,
        default="1,2,4",
        metavar="LIST",
        help=f"queue pairs over each device {SHOWN}",
    )
    add(
        "--lag",
        type=one_of(LAGS),
        default="0",
        metavar="LIST",
        help=f"values of STEPMESH_SPLIT_QP_LAG, of {', '.join(LAGS)} {SHOWN}",
    )
    add("--sizes", type=sizes, default="4K,1M,16M", metavar="LIST", help=f"bytes each way {SHOWN}")
    add("--scheduler", metavar="HOST:PORT", help="two hosts: an address of the server's host")
    add("--role", choices=("worker", "server"), help="two hosts: the role of this host")
    return made
