"""The programs of tools/rdma_check.sh: how the two hosts meet, and what they exchange.

rdma_steps.py meet                    --role R --at HOST:PORT --seconds S --name STEP [--say WORDS]
rdma_steps.py bytes|layers|nccl|nixl  --role R --at HOST:PORT --seconds S --json FILE [OPTION...]

Those that exchange print a line that begins with "summary: ".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, STAGES = 61, 3
TENSORS, OUT, BACK = 7, 128 << 10, 256 << 10  # 896 KiB to the server, 1.75 MiB back
BUDGET_US = 1e6 / (LAYERS * STAGES * 20)  # a round trip, at 20 tokens/s
NIXL, NIXL_WARM, NIXL_COUNT = (4 << 10, 1 << 20), 20, 200
LINE = 1 << 20  # characters of a line from the other host, at most

Options = argparse.Namespace
Result = dict[str, Any]


class Pair:
    """A connection of the two hosts, for fserver.bench.libraries. The client sends first."""

    def __init__(self, options: Options, device: Any = None) -> None:
        self.index, self.device = int(options.role == "server"), device
        host, _, port = options.at.rpartition(":")
        host, end = host.strip("[]"), time.monotonic() + options.seconds
        six = ":" in host
        if self.index:
            more = {"family": socket.AF_INET6, "dualstack_ipv6": True} if six else {}
            with socket.create_server((host, int(port)), **more) as listener:
                listener.settimeout(options.seconds)
                try:
                    self.socket = listener.accept()[0]
                except TimeoutError:
                    sys.exit(f"the client did not come to port {port} in {options.seconds:.0f} s")
        while not self.index:
            try:
                self.socket = socket.create_connection((host, int(port)), 3)
                break
            except OSError as e:
                if time.monotonic() > end:
                    sys.exit(f"{options.at}: {e} (is rdma_check.sh running there, the port open?)")
                time.sleep(0.1)
        self.socket.settimeout(options.seconds)
        self._lines = self.socket.makefile()

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


def meet(options: Options) -> None:
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


def percentiles(times: list[int]) -> dict[str, float]:
    from fserver.bench.report import percentile

    return {f"p{p}_us": round(percentile(sorted(times), p) / 1000, 1) for p in (50, 99)}


def opened(options: Options) -> Any:
    """A worker or a server, each the only one of its role."""
    import fserver

    one: Result = {"workers": 1, "servers": 1, "group_size": 1, "node_rank": 0, "gpu": 0}
    one |= {"backend": options.device.upper(), "init_timeout": options.seconds / 2}
    if options.role == "server":
        return fserver.Server(scheduler=options.at, host_scheduler=True, **one)
    return fserver.Worker(scheduler=options.at, **one)


def link_of(node: Any) -> dict[str, str]:
    (link,) = node.links()
    paths = [m.path for m in link.members if m.path] or [link.path]
    return {"transport": link.transport, "reason": link.reason, "path": "; ".join(paths)}


def serve(server: Any, backs: dict[int, list[Any]] | None = None) -> None:
    """Answers with what was pushed, or with what `backs` has under the key of the push."""
    import fserver

    with contextlib.suppress(fserver.ClosedError):
        while True:
            for handler, tensors, keys in server.get_batch():
                server.respond(backs[keys[0]] if backs else tensors, handler)
            del tensors


def timed(node: Any, options: Options, *push_pull: Any) -> int:
    """Nanoseconds of a round trip."""
    begin = time.monotonic_ns()
    node.wait(node.push_pull(*push_pull), 1000 * options.seconds)
    return time.monotonic_ns() - begin


def exchange(options: Options) -> Result:
    """Sends 1 B to --most bytes, and a byte less and more, there and back. Compares every byte."""
    import torch

    with opened(options) as node:
        found: Result = {"link": link_of(node), "sizes": []}
        if options.role == "server":
            serve(node)
            return found
        base = [4**i for i in range(14) if 4**i <= options.most]
        for count in sorted({max(1, n + d) for n in base for d in (-1, 0, 1)}):
            x = torch.randint(0, 256, (count,), dtype=torch.uint8).to(node.device)
            y, times = torch.empty_like(x), []
            for _ in range(5 if count > 1 << 20 else 50):
                x += 1
                y.copy_(~x)
                times.append(timed(node, options, [x], [count], [y], [count]))
                if not torch.equal(x, y):
                    at = int((x != y).nonzero()[0])
                    sys.exit(f"of {count} bytes the one at {at} came back wrong")
            found["sizes"].append({"bytes": count, "count": len(times), **percentiles(times)})
    return found


def layers(options: Options) -> Result:
    """Makes the round trips of tokens: 61 layers, each with 3 stages."""
    import torch

    def tensors(size: int, value: int) -> list[Any]:
        return [torch.full((size,), value, dtype=torch.uint8) for _ in range(TENSORS)]

    keys = {s: [100 * s + i for i in range(TENSORS)] for s in range(1, STAGES + 1)}
    with opened(options) as node:
        found: Result = {"link": link_of(node), "tokens": options.tokens}
        if options.role == "server":
            serve(node, {keys[s][0]: tensors(BACK, s) for s in keys})
            return found
        push, pull = {s: tensors(OUT, s) for s in keys}, {s: tensors(BACK, 0) for s in keys}
        trips, tokens = [], []
        for token in range(-1, options.tokens):  # the first one is not counted
            start = time.monotonic_ns()
            for s in [*keys] * LAYERS:
                trips.append(timed(node, options, push[s], keys[s], pull[s], keys[s]))
            tokens.append(time.monotonic_ns() - start)
            if token < 0:
                trips, tokens = [], []
            for s in keys:
                if any((t != s).any() for t in pull[s]):
                    sys.exit(f"stage {s} of token {token} came back wrong")
                for t in pull[s]:
                    t.zero_()
    rate = 1e9 / sorted(tokens)[len(tokens) // 2]
    return {**found, **percentiles(trips), "tokens_s": round(rate, 2)}


def nccl(options: Options) -> Result:
    """Sends and receives the same bytes by NCCL."""
    import torch
    import torch.distributed as dist

    rank = int(options.role == "client")
    dist.init_process_group("nccl", init_method=f"tcp://{options.at}", rank=rank, world_size=2)
    sizes = TENSORS * OUT, TENSORS * BACK
    out, back = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in sizes)
    calls, times = [(dist.send, out), (dist.recv, back)], []
    if rank == 0:
        calls = [(dist.recv, out), (dist.send, back)]
    for _ in range(50 + LAYERS * STAGES):
        begin = time.monotonic_ns()
        for call, tensor in calls:
            call(tensor, 1 - rank)
        torch.cuda.synchronize()
        times.append(time.monotonic_ns() - begin)
    dist.destroy_process_group()
    return percentiles(times[50:])


def nixl(options: Options) -> Result:
    """WRITEs of 4 KiB and 1 MiB by NIXL, there and back, and a notification behind each. Compares
    every byte. What is timed is the round trip, as in bytes."""
    import torch

    from fserver.bench import libraries

    pair = Pair(
        options, torch.device("cuda", 0) if options.device == "gpu" else torch.device("cpu")
    )
    make = libraries.pair("nixl", pair, max(NIXL))
    found: Result = {"memory": f"{options.device} memory"}
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
            each = {"bytes": count, "count": NIXL_COUNT, **percentiles(times[NIXL_WARM:])}
            found.setdefault("sizes", []).append(each)
    pair.barrier()  # nobody ends while the other one writes
    return found


def summary(found: Result) -> str:
    parts = [found["link"]["transport"]] if "link" in found else []
    parts += [found["memory"]] if "memory" in found else []
    for s in found.get("sizes", []):
        if s["bytes"] in (1, 4096, 1 << 20, found["sizes"][-2]["bytes"]):
            parts.append(f"{s['bytes']} B {s['p50_us']:.0f} us")
    if "p50_us" in found:
        parts.append(f"round trip p50 {found['p50_us']:.0f} us, p99 {found['p99_us']:.0f} us")
    if "tokens_s" in found:
        parts.append(f"{found['tokens_s']} tokens/s (20 need {BUDGET_US:.0f} us)")
    return ", ".join(parts)


def main() -> None:
    steps = {"meet": meet, "bytes": exchange, "layers": layers, "nccl": nccl, "nixl": nixl}
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=steps)
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
    if found := steps[options.step](options):
        Path(options.json).write_text(json.dumps(found, indent=1))
        print("summary:", summary(found))


if __name__ == "__main__":
    main()
