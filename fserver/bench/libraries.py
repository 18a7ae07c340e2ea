"""Other libraries that move tensors: NCCL (gloo on the CPU), symmetric memory of torch by its own
kernels or by NVSHMEM, and NIXL.

`join` makes this process one of several for a library, and `pair` gives round trips between two. A
process joins once: symmetric memory is of one make as long as it lives.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import WrongDataError
from .report import Figures, percentile
from .team import SideActor

ON_STREAMS = ("nccl", "symm", "nvshmem")  # a CUDA graph can hold their calls
ON_GPUS = (*ON_STREAMS, "nixl")
ON_CPU = ("gloo",)
BIG = 64 << 20  # bytes of a block of `copies`
WAIT = timedelta(seconds=30)
# None needs NVLink multicast, which is not to be used where a host's GPUs are shared.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "UCX_TLS": "cuda_ipc,cuda_copy,sm,tcp",
}
NIXL = ("nixl_cu13", "nixl_cu12", "nixl")  # names of its module
_kept: list[Any] = []  # as long as the process lives: freeing symmetric memory is a collective call


Ends = Sequence[tuple[int, torch.Tensor]]
"""The index of a peer and what goes there or comes from there: a contiguous part of the memory."""


class Channel(NamedTuple):
    """What one side sends and receives in a stage, on the current stream; with nixl, by the host.
    `check` waits for what was sent."""

    send: Callable[[], object]
    recv: Callable[[], object]
    check: Callable[[], None] = lambda: None

    def close(self) -> None:
        """As the channels of fserver have it."""
        self.check()


class Library(NamedTuple):
    """A library that this process has joined.

    `memory` is bytes. A tensor has the same place in the memory of who writes it and of who
    receives it. `open` makes a channel of a stage; all sides make the same ones in the same order.
    """

    memory: torch.Tensor
    open: Callable[[int, Ends, Ends], Channel]


def missing(way: str) -> str | None:
    """Why this machine has not what a library takes, if it is known before it is tried."""
    if way == "nixl" and not any(importlib.util.find_spec(name) for name in NIXL):
        return f"no module of {', '.join(NIXL)} is installed"
    return None


def join(way: str, side: SideActor, room: int, stages: int = 1) -> Library:
    """Makes this process one of several for a library, with so many bytes of memory.

    Raises:
        Exception: what the library itself raises where it does not work.
    """
    if way != "nixl":
        _group(way, side)
    made = {"symm": _symm, "nvshmem": _nvshmem, "nixl": _nixl}.get(way, _send_recv)
    library = made(side, room, stages)
    if side.device.type == "cuda":
        torch.cuda.synchronize()
    side.barrier()
    return library


def _group(way: str, side: SideActor) -> None:
    """The process group of torch, by loopback."""
    if way == "nvshmem":
        import torch.distributed._symmetric_memory as symm

        symm.set_backend("NVSHMEM")
    at, count = "127.0.0.1", side.count
    if side.index == 0:
        store = dist.TCPStore(at, 0, count, True, WAIT, wait_for_workers=False)
        side.exchange(store.port)
    else:
        store = dist.TCPStore(at, side.exchange(None)[0], count, False, WAIT)
    gpu: dict[str, Any] = {"device_id": side.device} if side.device.type == "cuda" else {}
    group = {"store": store, "rank": side.index, "world_size": count, "timeout": WAIT, **gpu}
    dist.init_process_group("nccl" if gpu else "gloo", **group)
    dist.barrier()


def _zeros(side: SideActor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=side.device)


def _symmetric(side: SideActor, count: int) -> tuple[torch.Tensor, Any]:
    """Zeros in symmetric memory, and what torch knows of them in all processes."""
    import torch.distributed._symmetric_memory as symm

    memory = symm.empty(count, dtype=torch.uint8, device=side.device)
    assert dist.group.WORLD is not None
    handle = symm.rendezvous(memory, dist.group.WORLD)
    _kept.append((memory, handle))
    return memory.zero_(), handle


def _send_recv(side: SideActor, room: int, stages: int) -> Library:
    """NCCL; gloo on the CPU. What goes to all peers is one call, and so is what comes from them.

    A send may wait for its recv, and a communicator does one call after the other. With several
    stages, a worker sends stage 1 before it receives stage 0, and a server sends stage 0 before it
    receives stage 1: with one communicator for both, or one stream of the caller's, each side would
    wait in its send. So each direction has a communicator, and what is sent a stream of its own
    (on the CPU, a send returns at once, and the next recv waits for it). Then nobody waits forever,
    with any number of workers and servers: let k count micro-batches, layer by layer. All sides do
    the k-th call of a direction in the order of k. A worker's send of k is behind its recv of
    k - stages, a server's behind its recv of k, and a recv of k is behind recvs before k. So both
    ends of a call wait for nothing but what is before it in that order.

    A pair with one stage has at most one message on the way: one communicator and plain calls do.
    """
    memory, pair = _zeros(side, room), side.count == 2 and stages == 1
    first = dist.group.WORLD
    assert first is not None
    second: Any = first if pair else dist.new_group()
    out, back = (first, second) if side.is_worker else (second, first)
    later = side.device.type == "cpu" and not pair

    def open_pair(stage: int, sends: Ends, recvs: Ends) -> Channel:
        [(peer, source)], [(_, landing)] = sends, recvs
        return Channel(lambda: dist.send(source, peer), lambda: dist.recv(landing, peer))

    def open_many(stage: int, sends: Ends, recvs: Ends) -> Channel:
        outgoing = [dist.P2POp(dist.isend, tensor, peer, out) for peer, tensor in sends]
        incoming = [dist.P2POp(dist.irecv, tensor, peer, back) for peer, tensor in recvs]
        sent: list[Any] = []

        def send() -> None:
            sent.extend(dist.batch_isend_irecv(outgoing))
            if not later:
                check()

        def recv() -> None:
            for work in dist.batch_isend_irecv(incoming):
                work.wait()
            check()

        def check() -> None:
            for work in sent:
                work.wait()
            sent.clear()

        return Channel(send, recv, check)

    return Library(memory, open_pair if pair else open_many)


def _symm(side: SideActor, room: int, stages: int) -> Library:
    """Copies into a peer's memory, and a flag. Nobody overwrites what is not read: a worker sends
    the next message of a stage after it received this one's answer, and a server answers what it
    received."""
    memory, handle = _symmetric(side, room)

    def there(peer: int, mine: torch.Tensor) -> torch.Tensor:
        theirs = handle.get_buffer(peer, memory.shape, torch.uint8)
        at = mine.data_ptr() - memory.data_ptr()
        found: torch.Tensor = theirs[at : at + mine.nbytes].view(mine.dtype).view(mine.shape)
        return found

    def open(stage: int, sends: Ends, recvs: Ends) -> Channel:
        copies = [(peer, mine, there(peer, mine)) for peer, mine in sends]

        def send() -> None:
            for peer, mine, theirs in copies:
                theirs.copy_(mine, non_blocking=True)
                handle.put_signal(peer, channel=stage)

        def recv() -> None:
            for peer, _ in recvs:
                handle.wait_signal(peer, channel=stage)

        return Channel(send, recv)

    return Library(memory, open)


def _nvshmem(side: SideActor, room: int, stages: int) -> Library:
    """Puts with a signal, to the same address at the peer. A signal must equal what is waited for,
    which a replayed graph meets too if the last value of a replay is not the first of the next: a
    graph has two messages of each stage or more. Channels of a stage go on counting."""
    ops, (memory, handle) = torch.ops.symm_mem, _symmetric(side, room)
    signals = handle.get_signal_pad(side.index, (stages, side.count), dtype=torch.int64)
    signals.zero_()
    sent, waited = [0] * stages, [0] * stages

    def open(stage: int, sends: Ends, recvs: Ends) -> Channel:
        flags = [signals[stage, i : i + 1] for i in range(side.count)]

        def send() -> None:
            sent[stage] += 1
            for peer, tensor in sends:
                ops.nvshmem_put_with_signal(tensor, flags[side.index], sent[stage], peer)

        def recv() -> None:
            waited[stage] += 1
            for peer, _ in recvs:
                ops.nvshmem_wait_for_signal(flags[peer], waited[stage], peer)

        return Channel(send, recv)

    return Library(memory, open)


def _nixl(side: SideActor, room: int, stages: int) -> Library:
    """Of a pair with one stage: a notification does not say what it is of. The agents write into
    each other's memory, registered once; without NIXL's own thread, which makes it slower."""
    package = next(name for name in NIXL if importlib.util.find_spec(name))
    api = importlib.import_module(f"{package}._api")
    agent = api.nixl_agent(f"side{side.index}", api.nixl_agent_config(enable_prog_thread=False))
    memory, here = _zeros(side, room), side.device.index or 0
    kind = "VRAM" if side.device.type == "cuda" else "DRAM"
    agent.register_memory([memory])
    other = 1 - side.index
    peer = agent.add_remote_agent(side.exchange(agent.get_agent_metadata())[other])
    peer = peer.decode() if isinstance(peer, bytes) else peer
    address, there = side.exchange((memory.data_ptr(), here))[other]

    def open(stage: int, sends: Ends, recvs: Ends) -> Channel:
        [(_, source)] = sends
        at = source.data_ptr() - memory.data_ptr()
        ours = agent.get_xfer_descs([(source.data_ptr(), source.nbytes, here)], kind)
        theirs = agent.get_xfer_descs([(address + at, source.nbytes, there)], kind)
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

        return Channel(send, recv)

    return Library(memory, open)


class Way(NamedTuple):
    """How one side sends source and takes what comes into landing, on the current stream."""

    source: torch.Tensor
    landing: torch.Tensor
    send: Callable[[], object]
    recv: Callable[[], object]


Open = Callable[[int, int], Way]
"""Makes the way for as many bytes out of this side, and into it. Both sides make the same ways in
the same order, and use one at a time. A round trip is a send and a recv on one side, and a recv and
a send on the other."""


def pair(way: str, side: SideActor, room: int) -> Open:
    """Joins as one of two. `room`: the most bytes of a message, the same on both sides."""
    room = -(-room // 256) * 256
    mine, peer = side.index, 1 - side.index
    library = join(way, side, 2 * room)

    def make(out: int, into: int) -> Way:
        source = library.memory[mine * room :][:out]
        landing = library.memory[peer * room :][:into]
        channel = library.open(0, [(peer, source)], [(peer, landing)])
        return Way(source, landing, channel.send, channel.recv)

    return make


def copies(devices: tuple[int, int]) -> Figures:
    """What the copy engine moves between two GPUs of this process, 64 MiB at a time, one way and
    both ways at once: microseconds of a block.

    torch makes both GPUs' streams wait for each other around a copy between them: with two copies
    in flight on streams of their own, that time is hidden. The faster counts.

    Raises:
        WrongDataError: what arrived is not what was sent.
    """
    count, rounds = 60, 8
    best: list[list[float]] = []
    for directions in ([devices], [devices, devices[::-1]]):
        tried = []
        for flying in (1, 2):
            pairs = [_tensors(a, b) for a, b in directions for _ in range(flying)]
            _copy(pairs, devices, 1)
            if any(not torch.equal(one[0].cpu(), one[1].cpu()) for one in pairs):
                raise WrongDataError("wire: what a copy brought is not what was sent")
            tried.append(
                sorted(_copy(pairs, devices, count) / count / flying for _ in range(rounds))
            )
        best.append(min(tried, key=lambda took: percentile(took, 50)))
    found = {f"p{p}_us": percentile(best[0], p) for p in (50, 99)}
    return {**found, "both_ways_p50_us": percentile(best[1], 50), "iters": count * rounds}


def _tensors(a: int, b: int) -> tuple[Any, ...]:
    source = torch.randint(0, 251, (BIG,), dtype=torch.uint8, device=f"cuda:{a}")
    landing = torch.full_like(source, 255, device=f"cuda:{b}")
    return source, landing, torch.cuda.Stream(a), torch.cuda.Stream(b)


def _copy(pairs: Sequence[Any], devices: Sequence[int], count: int) -> float:
    """Microseconds of so many copies of each pair."""
    for device in devices:
        torch.cuda.synchronize(device)
    started = time.perf_counter_ns()
    for _ in range(count):
        for source, landing, here, there in pairs:
            with torch.cuda.stream(there), torch.cuda.stream(here):
                landing.copy_(source, non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - started) / 1000
