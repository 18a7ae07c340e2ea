"""`fserver doctor`: tests this host or the path to another host, and says how to fix what fails."""

import argparse
import contextlib
import json
import sys

from fserver import _loader
from fserver.run import address
from fserver.settings import inherited

from . import cluster, host, listen, names, peer, protocol
from .report import Report, say


def main(argv: list[str]) -> int:
    """Returns 0 if everything that is needed works, else 1."""
    parser = argparse.ArgumentParser(
        prog="fserver doctor",
        description="Tests this host, and says what works, what does not, and how to fix it. If "
        "the environment describes a cluster (DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT), "
        "it also tests whether a process of this cluster can start here. With --peer it tests the "
        "path to another host instead. The exit status is 1 if fserver cannot work on this host, "
        "if the process cannot start, or if the path does not work; otherwise it is 0.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--peer",
        type=address,
        metavar="HOST:PORT",
        help="test the path to a scheduler, or to a host that runs `fserver doctor --listen`",
    )
    other.add_argument(
        "--listen",
        type=address,
        nargs="?",
        const=("", 0),
        metavar="HOST:PORT",
        help="answer `fserver doctor --peer` of another host until interrupted (default: any free "
        "port; all addresses of this host if a secret is set, else 127.0.0.1)",
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
        say(f"FSERVER_SECRET_FILE={e.filename}: {e.strerror} (name a file that this user can read)")
        return 1
    at = at or ("0.0.0.0" if key else "127.0.0.1")
    try:
        server = listen.listen(at, port)
    except OSError as e:
        where = names.join(at, port)
        say(
            f"cannot listen on {where}: {e.strerror or e} (give an address of this host and a free "
            "port)"
        )
        return 1
    if not key and at not in ("127.0.0.1", "::1", "localhost"):
        say("no secret is set, so every host that can connect may use this (set FSERVER_SECRET)")
    with contextlib.suppress(_loader.LoadError):  # its callers hear why, if they send tensors
        _loader.load()  # now: it takes seconds, which nobody is to wait for
    with server:
        print(f"listening on {names.join(at, server.getsockname()[1])}", flush=True)
        listen.serve(server, key)
    return 0
