"""Others' ways between two processes for any number of bytes out and back, to be timed beside ours:
NCCL (gloo on the CPU), symmetric memory of torch by its own kernels or by NVSHMEM, and NIXL.

Tensors are bytes of shape [n]. A round trip is a send and a recv on one side, and a recv and a send
on the other, on the current stream; nixl is done when its calls return.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import others
from .errors import WrongDataError
from .report import percentile

ON_GPUS = ("nccl", "symm", "nvshmem", "nixl")
ON_CPU = ("gloo",)
BIG = 64 << 20  # bytes of a block of the wire
_NIXL = ("nixl_cu13", "nixl_cu12", "nixl")


class Side(Protocol):
    """One of the two processes."""

    index: int  # 0, who sends first, or 1
    device: torch.device

    def exchange(self, mine: Any) -> Any:
        """Gives the other side an object and takes its own."""

    def barrier(self) -> None:
        """Waits for the other side."""


@dataclass
class Way:
    """How one side sends source and takes what comes into landing, on the current stream."""

    source: torch.Tensor
    landing: torch.Tensor
    send: Callable[[], Any]
    recv: Callable[[], Any]


Open = Callable[[int, int], Way]
"""Makes the way for as many bytes out of this side, and into it. Both sides make the same ways in
the same order, and use one at a time."""


def join(name: str, side: Side, room: int) -> Open:
    """Makes this process one of two for another's way. Once in the life of a process.

    Args:
        name: one of ON_GPUS or ON_CPU, as the device of the side is.
        side: this process.
        room: the most bytes that a message will have, the same on both sides.

    Raises:
        Exception: what the way itself raises where it is not to be had.
    """
    room = -(-room // 256) * 256
    if name == "nixl":
        return _nixl(side, room)
    others.join(name, side.index, 2, side.device, lambda port: side.exchange(port) or port)
    return {"symm": _symm, "nvshmem": _nvshmem}.get(name, _send_recv)(side, room)


def _empty(side: Side, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=side.device)


def _send_recv(side: Side, room: int) -> Open:
    peer = 1 - side.index

    def make(out: int, into: int) -> Way:
        source, landing = _empty(side, out), _empty(side, into)
        return Way(
            source, landing, lambda: dist.send(source, peer), lambda: dist.recv(landing, peer)
        )

    return make


def _symm(side: Side, room: int) -> Open:
    peer = 1 - side.index
    memory, handle = others.symmetric(room, side.device)

    def make(out: int, into: int) -> Way:
        source, theirs = _empty(side, out), handle.get_buffer(peer, (out,), torch.uint8)

        def send() -> None:
            theirs.copy_(source, non_blocking=True)
            handle.put_signal(peer, channel=0)

        return Way(source, memory[:into], send, lambda: handle.wait_signal(peer, channel=0))

    return make


def _nvshmem(side: Side, room: int) -> Open:
    """A put goes to the same symmetric address, so there is memory for each direction. The signal
    must equal what is waited for, which a replayed graph meets too: the last value of a replay is
    not the first of the next."""
    ops, me, peer = torch.ops.symm_mem, side.index, 1 - side.index
    memory, handle = others.symmetric(2 * room, side.device)
    signals = handle.get_signal_pad(me, (2,), dtype=torch.int64)
    signals.zero_()
    torch.cuda.synchronize()
    side.barrier()
    sent = waited = 0

    def make(out: int, into: int) -> Way:
        source, landing = memory[me * room :][:out], memory[peer * room :][:into]
        mine, theirs = signals[me : me + 1], signals[peer : peer + 1]

        def send() -> None:
            nonlocal sent
            sent += 1
            ops.nvshmem_put_with_signal(source, mine, sent, peer)

        def recv() -> None:
            nonlocal waited
            waited += 1
            ops.nvshmem_wait_for_signal(theirs, waited, peer)

        return Way(source, landing, send, recv)

    return make


def missing(way: str) -> str | None:
    """Why this machine has not what a way takes, if it is known before it is tried."""
    if way == "nixl" and not any(importlib.util.find_spec(name) for name in _NIXL):
        return f"no module of {', '.join(_NIXL)} is installed"
    return None


def _nixl(side: Side, room: int) -> Open:
    """The agents write into each other's memory, registered once; without NIXL's own thread, which
    makes it slower."""
    package = next(name for name in _NIXL if importlib.util.find_spec(name))
    api = importlib.import_module(f"{package}._api")
    agent = api.nixl_agent(f"side{side.index}", api.nixl_agent_config(enable_prog_thread=False))
    outgoing, incoming, at = _empty(side, room), _empty(side, room), side.device.index or 0
    kind = "VRAM" if side.device.type == "cuda" else "DRAM"
    agent.register_memory([outgoing, incoming])
    peer = agent.add_remote_agent(side.exchange(agent.get_agent_metadata()))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    address, device = side.exchange((incoming.data_ptr(), at))

    def make(out: int, into: int) -> Way:
        ours = agent.get_xfer_descs([(outgoing.data_ptr(), out, at)], kind)
        theirs = agent.get_xfer_descs([(address, out, device)], kind)
        transfer = agent.initialize_xfer("WRITE", ours, theirs, peer, b"sent")

        def send() -> None:
            state = agent.transfer(transfer, b"sent")
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"nixl: the state of a transfer is {state}")

        def recv() -> None:
            while not agent.get_new_notifs():
                pass

        return Way(outgoing[:out], incoming[:into], send, recv)

    return make


def wire(devices: tuple[int, int]) -> dict[str, Any]:
    """What the copy engine moves between two GPUs of this process, 64 MiB at a time, one way and
    both ways at once: microseconds of a block.

    torch makes both GPUs' streams wait for each other around a copy between them: with two copies
    in flight on streams of their own, that time is hidden. The faster counts.

    Raises:
        WrongDataError: what arrived is not what was sent.
    """
    copies, rounds = 60, 8
    found: dict[bool, list[float]] = {}
    for both in (False, True):
        for flying in (1, 2):
            lanes = []
            for a, b in [devices, devices[::-1]] if both else [devices]:
                for _ in range(flying):
                    source = torch.randint(0, 251, (BIG,), dtype=torch.uint8, device=f"cuda:{a}")
                    landing = torch.full_like(source, 255, device=f"cuda:{b}")
                    lanes.append((source, landing, torch.cuda.Stream(a), torch.cuda.Stream(b)))

            def run(lanes: list[Any], count: int) -> float:
                for device in devices:
                    torch.cuda.synchronize(device)
                started = time.perf_counter_ns()
                for _ in range(count):
                    for source, landing, here, there in lanes:
                        with torch.cuda.stream(there), torch.cuda.stream(here):
                            landing.copy_(source, non_blocking=True)
                for device in devices:
                    torch.cuda.synchronize(device)
                return (time.perf_counter_ns() - started) / 1000

            run(lanes, 1)
            if any(not torch.equal(lane[0].cpu(), lane[1].cpu()) for lane in lanes):
                raise WrongDataError("wire: what a copy brought is not what was sent")
            took = sorted(run(lanes, copies) / copies / flying for _ in range(rounds))
            best = found.get(both)
            if best is None or percentile(took, 50) < percentile(best, 50):
                found[both] = took
    return {
        "p50_us": percentile(found[False], 50),
        "p99_us": percentile(found[False], 99),
        "both_ways_p50_us": percentile(found[True], 50),
        "iters": copies * rounds,
    }
