"""Others' ways between GPUs, to be timed beside ours: NCCL, and symmetric memory of torch, with its
own kernels or NVSHMEM. What is here has the shape of a model; ways.py has round trips.

A process joins once, for one way: symmetric memory is of one make as long as a process lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WAYS = ("nccl", "symm", "nvshmem")
WAIT = timedelta(seconds=30)
# None needs NVLink multicast, which is not to be used where a host's GPUs are shared.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "UCX_TLS": "cuda_ipc,cuda_copy,sm,tcp",
}
_kept: list[Any] = []  # as long as the process lives: freeing symmetric memory is a collective call


def reason(error: BaseException) -> str:
    """The line that says most of what the sides reported: the cause, not that another is gone."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    found = r"(side \d: )?([\w.]*(Error|Exception)\b|exit status)"
    named = [line for line in lines if re.match(found, line)]
    gone = "EOFError|Pipe|BrokenBarrier|does not answer|by peer"
    first = [line for line in named if not re.search(gone, line)]
    if named and not first:
        return f"{named[0]}: it crashed, or hung and was ended; standard error says where"
    return (first or lines[-1:])[0][:300]


def join(
    way: str, index: int, count: int, device: torch.device, agree: Callable[[int], int]
) -> None:
    """Makes this process the one of that index among count, by loopback; on the CPU by gloo.

    Args:
        way: one of WAYS.
        index, count: rank and size of the group.
        device: of this process alone.
        agree: gives all of them the port that the first one has; it is called with 0 by the rest.
    """
    if way == "nvshmem":
        import torch.distributed._symmetric_memory as symm

        symm.set_backend("NVSHMEM")
    if index == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, True, WAIT, wait_for_workers=False)
        agree(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", agree(0), count, False, WAIT)
    gpu: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=index,
        world_size=count,
        timeout=WAIT,
        **gpu,
    )
    dist.barrier()


def symmetric(count: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """Bytes of symmetric memory, and what torch knows of them in all processes."""
    import torch.distributed._symmetric_memory as symm

    memory = symm.empty(count, dtype=torch.uint8, device=device)
    assert dist.group.WORLD is not None
    handle = symm.rendezvous(memory, dist.group.WORLD)
    _kept.append((memory, handle))
    return memory, handle


class _SendRecv:
    """NCCL; gloo on the CPU. What goes to all peers is one call, and so is what comes from them.

    A send may wait for its recv, and a communicator does one call after the other. A worker sends
    stage 1 before it receives stage 0, and a server sends stage 0 before it receives stage 1: with
    one communicator for both, or one stream of the caller's, each side would wait in its send. So
    each direction has a communicator, and what is sent a stream of its own. Then nobody waits for
    ever, with any number of workers and servers: let k count micro-batches, layer by layer. All
    sides do the k-th call of a direction in the order of k. A worker's send of k is behind its
    recv of k - stages, a server's behind its recv of k, and a recv of k is behind recvs before k.
    So both ends of a call wait for nothing but what is before it in that order.
    """

    def __init__(
        self, sends: Sequence[dist.P2POp], recvs: Sequence[dist.P2POp], host: bool
    ) -> None:
        self._sends, self._recvs, self._host = list(sends), list(recvs), host
        self._sent: list[Any] = []

    def send(self) -> None:
        self._sent = dist.batch_isend_irecv(self._sends)
        if not self._host:
            self.check()

    def recv(self) -> None:
        for work in dist.batch_isend_irecv(self._recvs):
            work.wait()
        self.check()

    def check(self) -> None:
        """Waits for what was sent: the stream does, or a host that knows that it has come."""
        for work in self._sent:
            work.wait()
        self._sent = []

    close = check


class _Symmetric:
    """Copies into a peer's memory, and a flag. Nobody overwrites what is not read: a worker sends
    the next layer of a stage after it received this one, and a server answers what it received."""

    def __init__(
        self, stage: int, sends: Sequence[tuple[int, Any, Any]], sources: Sequence[int], handle: Any
    ) -> None:
        self._stage, self._sends, self._sources = stage, sends, sources
        self._handle = handle

    def send(self) -> None:
        for peer, mine, theirs in self._sends:
            theirs.copy_(mine, non_blocking=True)
            self._handle.put_signal(peer, channel=self._stage)

    def recv(self) -> None:
        for peer in self._sources:
            self._handle.wait_signal(peer, channel=self._stage)

    def check(self) -> None:
        pass

    close = check


class _Nvshmem:
    """Puts with a signal, to the same address at the peer. A signal must equal what is waited for,
    which a replayed graph meets too if the last value of a replay is not the first of the next."""

    def __init__(
        self,
        sends: Sequence[tuple[int, Any]],
        sources: Sequence[int],
        signals: torch.Tensor,
        index: int,
    ) -> None:
        self._sends, self._sources = sends, sources
        self._signals, self._index = [signals[i : i + 1] for i in range(len(signals))], index
        self._sent = self._waited = 0

    def send(self) -> None:
        self._sent += 1
        for peer, tensor in self._sends:
            torch.ops.symm_mem.nvshmem_put_with_signal(
                tensor, self._signals[self._index], self._sent, peer
            )

    def recv(self) -> None:
        self._waited += 1
        for peer in self._sources:
            torch.ops.symm_mem.nvshmem_wait_for_signal(self._signals[peer], self._waited, peer)

    def check(self) -> None:
        pass

    close = check


def channels(
    way: str, side: Any, shape: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor, Any]]:
    """For each stage: int8, bf16, and what has send, recv, check and close.

    Each has been used once, on the current stream: NCCL connects when it is first used, and no
    kernel should be loaded beside one that waits.

    Args:
        way: one of WAYS, for which this process has joined.
        side: the process, a graph.Side.
        shape: layers, stages, rows, width.

    Returns:
        The int8 are [rows, width] on a worker and [workers, rows, width] on a server, the bf16
        are [servers, rows, width] and [workers, rows, width].
    """
    layers, stages, rows, width = shape
    if way == "nvshmem" and layers < 2:
        raise ValueError(f"layers is {layers}: nvshmem wants 2, for signals that differ")
    workers, servers, rank, device = side.workers, side.servers, side.rank, side.device
    world = workers + servers
    peers = range(workers, world) if side.is_worker else range(workers)
    # The same in all processes, so that a put needs no address: in small a slot for each worker,
    # in large one for each server and worker.
    bytes_small = stages * workers * rows * width
    bytes_large = 2 * servers * bytes_small
    handle: Any = None
    if way == "nccl":
        memory = torch.zeros(bytes_large + bytes_small, dtype=torch.uint8, device=device)
    else:
        memory, handle = symmetric(bytes_large + bytes_small, device)
        memory.zero_()

    def cut(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        large, small = of.split([bytes_large, bytes_small])
        return (
            small.view(torch.int8).view(stages, workers, rows, width),
            large.view(torch.bfloat16).view(stages, servers, workers, rows, width),
        )

    def outgoing(of: torch.Tensor, stage: int) -> list[torch.Tensor]:
        """Of each peer, where what this process sends is in memory."""
        small, large = cut(of)
        return [small[stage, rank]] * servers if side.is_worker else list(large[stage, rank])

    small, large = cut(memory)
    if way == "nccl":
        first, second = dist.group.WORLD, dist.new_group()
        assert first is not None and isinstance(second, dist.ProcessGroup)
        out, back = (first, second) if side.is_worker else (second, first)
    elif way == "symm":
        theirs = [handle.get_buffer(peer, memory.shape, torch.uint8) for peer in peers]
    else:
        signals = handle.get_signal_pad(side.index, (stages, world), dtype=torch.int64)
        signals.zero_()
    side.sync()
    side.barrier()
    opened = []
    for stage in range(stages):
        mine = small[stage, rank] if side.is_worker else small[stage]
        wide = large[stage, :, rank] if side.is_worker else large[stage, rank]
        into = list(wide if side.is_worker else mine)
        sent = outgoing(memory, stage)
        channel: Any
        if way == "nccl":
            channel = _SendRecv(
                [dist.P2POp(dist.isend, t, p, out) for p, t in zip(peers, sent, strict=True)],
                [dist.P2POp(dist.irecv, t, p, back) for p, t in zip(peers, into, strict=True)],
                side.dry,
            )
        elif way == "symm":
            at = [outgoing(of, stage)[i] for i, of in enumerate(theirs)]
            channel = _Symmetric(stage, list(zip(peers, sent, at, strict=True)), peers, handle)
        else:
            to = list(zip(peers, sent, strict=True))
            channel = _Nvshmem(to, peers, signals[stage], side.index)
        calls = [channel.send, channel.recv]
        for call in calls if side.is_worker else calls[::-1]:
            call()
        side.sync()
        side.barrier()
        opened.append((mine, wide, channel))
    return opened
