"""The programs of tools/rdma_check.sh: how the two hosts meet, and what they exchange.

rdma_steps.py meet    --role R --at HOST:PORT --name STEP --seconds S [--say WORDS]
rdma_steps.py bytes   --role R --at HOST:PORT --seconds S --json FILE [--most BYTES] [--device D]
rdma_steps.py layers  --role R --at HOST:PORT --seconds S --json FILE [--tokens N]
rdma_steps.py nccl    --role R --at HOST:PORT --json FILE
rdma_steps.py nixl    --role R --at HOST:PORT --seconds S --json FILE [--device D]
rdma_steps.py device  FILE       prints device, port and GID index of a result of bytes, if any
rdma_steps.py headline FILE      prints one line of a result
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, STAGES = 61, 3
TENSORS, OUT, BACK = 7, 128 << 10, 256 << 10  # 896 KiB to the server, 1.75 MiB back
BUDGET_US = 1e6 / (LAYERS * STAGES * 20)  # a round trip, at 20 tokens/s
NIXL, NIXL_WARM, NIXL_COUNT = (4 << 10, 1 << 20), 20, 200
LINE = 500  # bytes that a host says at a meeting, at most


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


# -- the meeting


def meet(options: argparse.Namespace) -> None:
    """Waits for the other host, and prints the address of the server's host, and what the other
    one says."""
    end = time.monotonic() + options.seconds
    mine = f"rdma_check {options.name} {options.say}".strip() + "\n"
    with _server(options, end) if options.role == "server" else _client(options, end) as sock:
        sock.settimeout(10)
        sock.sendall(mine.encode())
        with sock.makefile() as lines:
            said = lines.readline(LINE).split()
        at = sock.getsockname() if options.role == "server" else sock.getpeername()
    if said[:2] != ["rdma_check", options.name]:
        sys.exit(f"the other host is at another step: {' '.join(said)[:60]!r} (start both anew)")
    print(at[0], *said[2:])


def _server(options: argparse.Namespace, end: float) -> socket.socket:
    host, port = address(options.at)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        listener.settimeout(max(0.1, end - time.monotonic()))
        try:
            return listener.accept()[0]
        except TimeoutError:
            sys.exit(f"the client did not come to port {port} in {options.seconds:.0f} s")


def _client(options: argparse.Namespace, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address(options.at), 3)
        except OSError as e:
            if time.monotonic() > end:
                sys.exit(f"{options.at}: {e} (is rdma_check.sh running there, and the port open?)")
            time.sleep(0.1)


# -- what is exchanged


def _node(options: argparse.Namespace) -> Any:
    import fserver

    kind = fserver.Server if options.role == "server" else fserver.Worker
    own = {"host_scheduler": True} if options.role == "server" else {}
    return kind(
        scheduler=options.at,
        workers=1,
        servers=1,
        group_size=1,
        node_rank=0,
        gpu=0,
        backend=options.device.upper(),
        init_timeout=options.seconds / 2,
        **own,
    )


def _serve(server: Any, backs: dict[int, list[Any]] | None = None) -> None:
    """Answers with what was pushed, or with what backs has under the key of the push."""
    import fserver

    with contextlib.suppress(fserver.ClosedError):
        while True:
            for handler, tensors, keys in server.get_batch():
                server.respond(backs[keys[0]] if backs else tensors, handler)
            del tensors


def _link(node: Any) -> dict[str, str]:
    (link,) = node.links()
    paths = [m.path for m in link.members if m.path] or [link.path]
    return {"transport": link.transport, "reason": link.reason, "path": "; ".join(paths)}


def _percentiles(times: list[int]) -> dict[str, float]:
    times = sorted(times)
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    return {"p50_us": round(p50 / 1000, 1), "p99_us": round(p99 / 1000, 1)}


def exchange(options: argparse.Namespace) -> dict[str, Any]:
    """Sends 1 B to --most bytes, and a byte less and more, there and back. Compares every byte."""
    import torch

    with _node(options) as node:
        found: dict[str, Any] = {"link": _link(node), "sizes": []}
        if options.role == "server":
            _serve(node)
            return found
        base = [4**i for i in range(14) if 4**i <= options.most]
        for count in sorted({max(1, n + d) for n in base for d in (-1, 0, 1)}):
            x = torch.randint(0, 256, (count,), dtype=torch.uint8).to(node.device)
            y, times = torch.empty_like(x), []
            for _ in range(5 if count > 1 << 20 else 50):
                x += 1
                y.copy_(~x)
                begin = time.monotonic_ns()
                node.wait(node.push_pull([x], [count], [y], [count]), 1000 * options.seconds)
                times.append(time.monotonic_ns() - begin)
                if not torch.equal(x, y):
                    at = int((x != y).nonzero()[0])
                    sys.exit(f"of {count} bytes the one at {at} came back wrong")
            found["sizes"].append({"bytes": count, "count": len(times), **_percentiles(times)})
    return found


def layers(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the round trips of tokens: 61 layers, each with 3 stages."""
    import torch

    def tensors(size: int, value: int) -> list[Any]:
        return [torch.full((size,), value, dtype=torch.uint8) for _ in range(TENSORS)]

    keys = {s: [100 * s + i for i in range(TENSORS)] for s in range(1, STAGES + 1)}
    with _node(options) as node:
        found: dict[str, Any] = {"link": _link(node), "tokens": options.tokens}
        if options.role == "server":
            _serve(node, {keys[s][0]: tensors(BACK, s) for s in keys})
            return found
        push, pull = {s: tensors(OUT, s) for s in keys}, {s: tensors(BACK, 0) for s in keys}
        trips, tokens = [], []
        for token in range(-1, options.tokens):  # the first one is not counted
            start = time.monotonic_ns()
            for _ in range(LAYERS):
                for s in keys:
                    begin = time.monotonic_ns()
                    ticket = node.push_pull(push[s], keys[s], pull[s], keys[s])
                    node.wait(ticket, 1000 * options.seconds)
                    trips.append(time.monotonic_ns() - begin)
            tokens.append(time.monotonic_ns() - start)
            if token < 0:
                trips, tokens = [], []
            for s in keys:
                if any((t != s).any() for t in pull[s]):
                    sys.exit(f"stage {s} of token {token} came back wrong")
                for t in pull[s]:
                    t.zero_()
    rate = 1e9 / sorted(tokens)[len(tokens) // 2]
    return {**found, **_percentiles(trips), "tokens_s": round(rate, 2)}


def nccl(options: argparse.Namespace) -> dict[str, Any]:
    """Sends and receives the same bytes by NCCL."""
    import torch
    import torch.distributed as dist

    server = options.role == "server"
    dist.init_process_group(
        "nccl", init_method=f"tcp://{options.at}", rank=0 if server else 1, world_size=2
    )
    out = torch.zeros(TENSORS * OUT, dtype=torch.uint8, device="cuda")
    back = torch.zeros(TENSORS * BACK, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(50 + LAYERS * STAGES):
        begin = time.monotonic_ns()
        if server:
            dist.recv(out, 1), dist.send(back, 1)
        else:
            dist.send(out, 0), dist.recv(back, 0)
        torch.cuda.synchronize()
        times.append(time.monotonic_ns() - begin)
    dist.destroy_process_group()
    return _percentiles(times[50:])


class Pair:
    """The two hosts, as fserver.bench.libraries wants the sides. The client sends first."""

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        server, end = options.role == "server", time.monotonic() + options.seconds
        self.index, self.device = int(server), device
        self._sock = _server(options, end) if server else _client(options, end)
        self._sock.settimeout(options.seconds)
        self._lines = self._sock.makefile()

    def exchange(self, mine: Any) -> list[Any]:
        """Gives the other host bytes, or what JSON has, and takes its own: those of both."""
        coded = isinstance(mine, bytes)
        text = json.dumps([coded, base64.b64encode(mine).decode() if coded else mine])
        self._sock.sendall(text.encode() + b"\n")
        if not (line := self._lines.readline()):
            sys.exit("the other host has ended this step (its log says why)")
        coded, theirs = json.loads(line)
        theirs = base64.b64decode(theirs) if coded else theirs
        return [theirs, mine] if self.index else [mine, theirs]

    def barrier(self) -> None:
        self.exchange(None)


def nixl(options: argparse.Namespace) -> dict[str, Any]:
    """WRITEs of 4 KiB and 1 MiB by NIXL, there and back, and a notification behind each. Compares
    every byte. What is timed is the round trip, as in bytes."""
    import torch

    from fserver.bench import libraries

    device = torch.device("cuda", 0) if options.device == "gpu" else torch.device("cpu")
    pair = Pair(options, device)
    make = libraries.pair("nixl", pair, max(NIXL))
    found: dict[str, Any] = {"memory": f"{options.device} memory"}
    for count in NIXL:
        way, times = make(count, count), []
        for turn in range(NIXL_WARM + NIXL_COUNT):
            way.source.fill_((turn + 100 * pair.index) % 251)
            if options.device == "gpu":
                torch.cuda.synchronize()
            pair.barrier()  # both are filled, and what came last was compared
            begin = time.monotonic_ns()
            for call in (way.recv, way.send) if pair.index else (way.send, way.recv):
                call()
            times.append(time.monotonic_ns() - begin)
            if (way.landing != (turn + 100 * (1 - pair.index)) % 251).any():
                sys.exit(f"of {count} bytes by NIXL some came wrong")
        if pair.index == 0:  # the server's times begin before the client sends
            each = {"bytes": count, "count": NIXL_COUNT, **_percentiles(times[NIXL_WARM:])}
            found.setdefault("sizes", []).append(each)
    pair.barrier()  # nobody ends while the other one writes
    return found


# -- results


def device(file: str) -> None:
    path = json.loads(Path(file).read_text())["link"]["path"]
    if found := re.match(r"(\S+) port (\d+), GID (\d+) ", path):
        print(*found.groups())


def headline(file: str) -> None:
    found = json.loads(Path(file).read_text())
    parts = []
    if "link" in found:
        parts.append(found["link"]["transport"])
    if "memory" in found:
        parts.append(found["memory"])
    for s in found.get("sizes", []):
        if s["bytes"] in (1, 4096, 1 << 20, found["sizes"][-2]["bytes"]):
            parts.append(f"{s['bytes']} B {s['p50_us']:.0f} us")
    if "p50_us" in found:
        parts.append(f"round trip p50 {found['p50_us']:.0f} us, p99 {found['p99_us']:.0f} us")
    if "tokens_s" in found:
        parts.append(f"{found['tokens_s']} tokens/s (20 need {BUDGET_US:.0f} us)")
    print(", ".join(parts))


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("device", "headline"):
        {"device": device, "headline": headline}[sys.argv[1]](sys.argv[2])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=("meet", "bytes", "layers", "nccl", "nixl"))
    parser.add_argument("--role", choices=("server", "client"), required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--name", default="")
    parser.add_argument("--say", default="")
    parser.add_argument("--json", default="/dev/null")
    parser.add_argument("--most", type=int, default=64 << 20)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    if options.step == "meet":
        meet(options)
        return
    steps = {"bytes": exchange, "layers": layers, "nccl": nccl, "nixl": nixl}
    found = steps[options.step](options)
    Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
