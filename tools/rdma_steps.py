"""What tools/rdma_check.sh has no command for: how the two hosts meet, and round trips of other
libraries between them.

    rdma_steps.py meet       --role R --at HOST:PORT --seconds S --name STEP [--say WORDS]
    rdma_steps.py nccl|nixl  --role R --at HOST:PORT --seconds S --json FILE [--device cpu|gpu]

A library prints a line that begins with "summary: ".
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from fserver.run import address

SIZES = (4 << 10, 4 << 10), (1 << 20, 1 << 20), (896 << 10, 1792 << 10)  # bytes there and back
WARM, COUNT = 20, 200


def connected(options: argparse.Namespace) -> socket.socket:
    where, end = "{}:{}".format(*options.at), time.monotonic() + options.seconds
    if options.role == "server":
        family = socket.AF_INET6 if ":" in options.at[0] else socket.AF_INET
        with socket.create_server(options.at, family=family) as listener:
            listener.settimeout(options.seconds)
            try:
                return listener.accept()[0]
            except TimeoutError:
                sys.exit(f"the client did not come to {where} in {options.seconds:g} s")
    while True:
        try:
            return socket.create_connection(options.at, 3)
        except OSError as e:
            if time.monotonic() > end:
                sys.exit(f"{where}: {e} (is rdma_check.sh running there, the port open?)")
            time.sleep(0.1)


def meet(options: argparse.Namespace) -> None:
    """Waits for the other host, without torch. Prints the address of the server, and its words."""
    with connected(options) as other:
        other.settimeout(10)
        other.sendall(json.dumps([options.name, options.say]).encode() + b"\n")
        try:
            step, said = json.loads(other.makefile().readline(1 << 20))
        except (TypeError, ValueError):
            step, said = "no step of rdma_check.sh", ""
        if step != options.name:
            sys.exit(f"the other host is at another step: {step[:60]!r} (start both anew)")
        own = options.role == "server"
        print((other.getsockname() if own else other.getpeername())[0], said)


def trips(options: argparse.Namespace) -> None:
    """Times round trips. Before and after, all bytes of one are compared."""
    from torch.distributed import TCPStore

    from fserver.bench.crew import Case
    from fserver.bench.libraries import Rival
    from fserver.bench.report import show_size

    is_server, rows = options.role == "server", []
    limit = timedelta(seconds=options.seconds)
    if is_server:
        host, port = options.at
        _store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    gpu = 0 if options.device == "gpu" else None
    side = Rival(lambda _: None, int(is_server), (1, 1), options.at, gpu, timeout=limit)
    side.join(options.step, max(map(max, SIZES)))
    for out, back in SIZES:
        side.prepare(Case("push_pull", (out,), (back,)))
        side.verify(0)
        rows.append({"bytes_out": out, "bytes_back": back, **side.measure(WARM, COUNT)})
        side.verify(1)
    if not is_server:  # the times of the server begin before the client sends
        memory = f"{options.device} memory"
        Path(options.json).write_text(json.dumps({"memory": memory, "rows": rows}, indent=1))
        each = [f"{show_size(row['bytes_out'])} {row['p50_us']:.1f} us" for row in rows]
        print("summary:", ", ".join([memory, *each]))
        side.store.set("left", "")
    else:
        side.store.get("left")  # the client has got all that the store here has for it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("meet", "nccl", "nixl"))
    parser.add_argument("--role", choices=("server", "client"), required=True)
    parser.add_argument("--at", type=address, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--name", default="")
    parser.add_argument("--say", default="")
    parser.add_argument("--json", default="/dev/null")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    (meet if options.step == "meet" else trips)(options)


if __name__ == "__main__":
    main()
