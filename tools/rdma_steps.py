"""What tools/rdma_check.sh has no command for: how the two hosts meet, and round trips of other
libraries between them.

    rdma_steps.py meet       --role R --at HOST:PORT --seconds S --name STEP [--say WORDS]
    rdma_steps.py nccl|nixl  --role R --at HOST:PORT --seconds S --json FILE [--device cpu|gpu]

A library may use the port after PORT too. It prints a line that begins with "summary: ".
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SIZES = (4 << 10, 4 << 10), (1 << 20, 1 << 20), (896 << 10, 1792 << 10)  # bytes there and back
WARM, COUNT = 20, 200
LINE = 1 << 20  # characters of a line from the other host, at most


class Pair:
    """A connection of the two hosts, and a side for fserver.bench.libraries. The client is 0."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.index = int(options.role == "server")
        host, _, port = options.at.rpartition(":")
        self.at = host.strip("[]"), int(port)
        self.socket = self._accepted(options) if self.index else self._connected(options)
        self.socket.settimeout(options.seconds)
        self._lines = self.socket.makefile()

    def _accepted(self, options: argparse.Namespace) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.at[0] else socket.AF_INET
        with socket.create_server(self.at, family=family) as listener:
            listener.settimeout(options.seconds)
            try:
                return listener.accept()[0]
            except TimeoutError:
                sys.exit(f"the client did not come to {options.at} in {options.seconds:g} s")

    def _connected(self, options: argparse.Namespace) -> socket.socket:
        end = time.monotonic() + options.seconds
        while True:
            try:
                return socket.create_connection(self.at, 3)
            except OSError as e:
                if time.monotonic() > end:
                    sys.exit(f"{options.at}: {e} (is rdma_check.sh running there, the port open?)")
                time.sleep(0.1)

    def exchange(self, mine: Any) -> list[Any]:
        """Gives the other host bytes, or what JSON has, and takes its own: those of both."""
        text = json.dumps(mine, default=lambda b: {"hex": b.hex()})
        self.socket.sendall(f"{text}\n".encode())
        if not (line := self._lines.readline(LINE)):
            sys.exit("the other host has ended this step (its log says why)")
        theirs = json.loads(line, object_hook=lambda found: bytes.fromhex(found["hex"]))
        return [theirs, mine] if self.index else [mine, theirs]

    def barrier(self) -> None:
        self.exchange(None)


def meet(options: argparse.Namespace) -> None:
    """Waits for the other host. Prints the address of the server's host, and what the other host
    says."""
    pair = Pair(options)
    pair.socket.settimeout(10)
    try:
        step, said = pair.exchange([options.name, options.say])[1 - pair.index]
    except (KeyError, TypeError, ValueError):
        step, said = "no step of rdma_check.sh", ""
    if step != options.name:
        sys.exit(f"the other host is at another step: {step[:60]!r} (start both anew)")
    print((pair.socket.getsockname() if pair.index else pair.socket.getpeername())[0], said)


def joined(options: argparse.Namespace, pair: Any) -> Callable[[int, int], Any]:
    """Joins the other host. Returns what makes a way for so many bytes out and in."""
    import torch
    import torch.distributed as dist

    from fserver.bench import libraries

    if options.step == "nixl":
        return libraries.pair("nixl", pair, max(map(max, SIZES)))
    host, port = pair.at
    store = dist.TCPStore(host, port + 1, 2, bool(pair.index))
    dist.init_process_group("nccl", store=store, rank=pair.index, world_size=2)

    zeros, peer = partial(torch.zeros, dtype=torch.uint8, device=pair.device), 1 - pair.index

    def make(out: int, into: int) -> libraries.Way:
        source, landing = zeros(out), zeros(into)
        calls = partial(dist.send, source, peer), partial(dist.recv, landing, peer)
        return libraries.Way(source, landing, *calls)

    return make


def trips(options: argparse.Namespace) -> None:
    """Times round trips, of which every byte is compared."""
    import torch

    from fserver.bench.report import percentile, show_size

    pair = Pair(options)
    pair.device = torch.device("cuda", 0) if options.device == "gpu" else torch.device("cpu")
    settle = torch.cuda.synchronize if options.device == "gpu" else lambda: None
    make, rows = joined(options, pair), []
    for sizes in SIZES:
        way, times = make(*sizes[:: -1 if pair.index else 1]), []
        calls = (way.recv, way.send) if pair.index else (way.send, way.recv)
        for turn in range(WARM + COUNT):
            way.source.fill_((turn + 100 * pair.index) % 251)
            settle()
            pair.barrier()  # both are filled, and what came last was compared
            begin = time.monotonic_ns()
            for call in calls:
                call()
            if options.step == "nccl":
                settle()
            times.append((time.monotonic_ns() - begin) / 1000)
            if (way.landing != (turn + 100 * (1 - pair.index)) % 251).any():
                sys.exit(f"of {way.landing.nbytes} bytes by {options.step} some came wrong")
        ordered = sorted(times[WARM:])
        p50, p99 = (round(percentile(ordered, p), 1) for p in (50, 99))
        rows.append({"bytes_out": sizes[0], "bytes_back": sizes[1], "p50_us": p50, "p99_us": p99})
    pair.barrier()  # nobody ends while the other one writes
    if pair.index == 0:  # the server's times begin before the client sends
        found = {"memory": f"{options.device} memory", "rows": rows}
        Path(options.json).write_text(json.dumps(found, indent=1))
        each = [f"{show_size(row['bytes_out'])} {row['p50_us']} us" for row in rows]
        print("summary:", ", ".join([found["memory"], *each]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("meet", "nccl", "nixl"))
    parser.add_argument("--role", choices=("server", "client"), required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--name", default="")
    parser.add_argument("--say", default="")
    parser.add_argument("--json", default="/dev/null")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    if options.step == "meet":
        meet(options)
    else:
        trips(options)


if __name__ == "__main__":
    main()
