"""`fserver doctor`: what works on this host, what does not, and what to do about it."""

import argparse
import json
import sys

from fserver.api import inherited

from . import cluster, host
from .report import Report


def main(argv: list[str]) -> int:
    """Returns 0 where the cluster that the environment describes would start, else 1."""
    parser = argparse.ArgumentParser(
        prog="fserver doctor",
        description="Says what works on this host, what does not, and what to do about it. The "
        "exit status is 1 if the cluster that the environment describes would not start.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    report = Report()
    this_host(report)
    if options.json:
        print(json.dumps(report.json(), indent=1))
    else:
        report.print(sys.stdout)
    return report.status


def this_host(report: Report) -> None:
    """Everything that can be said without another host."""
    values = inherited()
    found = host.engine(report, values)
    if found is not None:
        host.transports(report, found)
        host.devices(report, found)
        host.limits(report, found)
        cluster.check(report, values, found)
