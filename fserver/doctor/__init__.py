"""`fserver doctor`: what works on this host, what does not, and what to do about it."""

import argparse
import json
import sys

from fserver.api import inherited
from fserver.run import address

from . import cluster, host, listen, names, peer, protocol
from .report import Report, say


def main(argv: list[str]) -> int:
    """Returns 0 where the cluster that the environment describes would start, and a peer can be
    worked with; else 1."""
    parser = argparse.ArgumentParser(
        prog="fserver doctor",
        description="Says what works on this host, what does not, and what to do about it. The "
        "exit status is 1 if the cluster that the environment describes would not start, or if "
        "the path to the peer does not work.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--peer",
        type=address,
        metavar="HOST:PORT",
        help="try the path to a scheduler, or to a doctor that listens",
    )
    other.add_argument(
        "--listen",
        type=address,
        nargs="?",
        const=("", 0),
        metavar="HOST:PORT",
        help="be the other end for --peer (default: this host's loopback, or, with a secret, any "
        "of its addresses; any free port)",
    )
    options = parser.parse_args(argv)
    values = inherited()
    if options.listen:
        at, port = options.listen
        return _listen(at, port, values)
    report = Report()
    if options.peer:
        at, port = options.peer
        peer.check(report, at, port, values)
    else:
        _this_host(report, values)
    if options.json:
        print(json.dumps(report.json(), indent=1))
    else:
        report.print(sys.stdout)
    return report.status


def _this_host(report: Report, values: dict[str, str]) -> None:
    found = host.engine(report, values)
    if found is not None:
        host.transports(report, found)
        host.devices(report, found)
        host.limits(report, found)
        cluster.check(report, values, found)


def _listen(at: str, port: int, values: dict[str, str]) -> int:
    try:
        key = protocol.secret(values)
    except OSError as e:
        say(f"FSERVER_SECRET_FILE={e.filename}: {e.strerror}")
        return 1
    at = at or ("0.0.0.0" if key else "127.0.0.1")
    try:
        server = listen.listen(at, port)
    except OSError as e:
        where = names.join(at, port)
        say(f"listen on {where}: {e.strerror or e} (name an address of this host and a free port)")
        return 1
    if not key and at not in ("127.0.0.1", "::1", "localhost"):
        say("without a secret whoever can connect can measure (set FSERVER_SECRET)")
    with server:
        print(f"listening on {names.join(at, server.getsockname()[1])}", flush=True)
        listen.serve(server, key)
    return 0
