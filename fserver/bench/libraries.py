"""Other libraries beside ours: NCCL (gloo on the CPU), symmetric memory of torch by its own kernels
or by NVSHMEM, and NIXL. Each has processes of its own, on the same GPUs or on the CPU. A process
joins one of them, and once."""

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .actors import POISON
from .baseline import SMALL
from .crew import Case
from .options import ON_CPU, ON_GPUS
from .report import Figures, figures
from .run import Way
from .team import WAIT, Team, Teammate

LIMIT = 60.0  # seconds; what is done in one go, the first of which takes longest

BIG = 64 << 20  # bytes of a large message
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

# The index of a peer and what goes there or comes from there: a contiguous part of the memory.
Ends = Sequence[tuple[int, torch.Tensor]]
Call = Callable[[], object]
# For each stage, the bytes that a worker sends to every server, and those of each answer.
Sizes = Sequence[tuple[int, int]]


class Route(NamedTuple):
    """Sends `source` and receives into `landing`: on the current stream; with nixl, by the host."""

    source: torch.Tensor
    landing: torch.Tensor
    send: Call
    recv: Call
    check: Call = lambda: None
    close: Call = lambda: None

    def trip(self, side: Teammate) -> None:
        """A round trip, in which a worker sends first."""
        for call in (self.send, self.recv) if side.is_worker else (self.recv, self.send):
            call()


class SendRecv:
    """NCCL; gloo on the CPU. One call sends to all peers, and one receives from all.

    A send may wait for its recv, and a communicator does one call after the other. With several
    stages, a worker sends stage 1 before it receives stage 0, and a server sends stage 0 before it
    receives stage 1. So each direction has a communicator, and sends have their own stream (on the
    CPU, a send returns at once, and the next recv waits for it). Nobody waits forever: all sides
    make the calls of a direction in one order. For a pair with one stage, plain calls do."""

    def __init__(self, side: Teammate, room: int, stages: int):
        self.memory, self.later = _zeros(side, room), side.device.type == "cpu"
        self.plain = side.count == 2 and stages == 1
        self.groups: list[Any] = [None, None if self.plain else dist.new_group()]
        if not side.is_worker:
            self.groups.reverse()

    def open(self, stage: int, sends: Ends, recvs: Ends) -> tuple[Call, Call]:
        if self.plain:
            [(peer, source)], [(_, landing)] = sends, recvs
            return partial(dist.send, source, peer), partial(dist.recv, landing, peer)
        out, back = self.groups
        outgoing = [dist.P2POp(dist.isend, tensor, peer, out) for peer, tensor in sends]
        incoming = [dist.P2POp(dist.irecv, tensor, peer, back) for peer, tensor in recvs]
        sent: list[Any] = []

        def send() -> None:
            sent.extend(dist.batch_isend_irecv(outgoing))
            if not self.later:
                wait(sent)

        def recv() -> None:
            wait(dist.batch_isend_irecv(incoming))
            wait(sent)

        def wait(works: list[Any]) -> None:
            while works:
                works.pop(0).wait()

        return send, recv


class Symmetric:
    """Copies into a peer's memory, and a flag. Nothing unread is overwritten: a worker waits for
    the answer before it sends the next message of a stage, and a server only answers."""

    def __init__(self, side: Teammate, room: int, stages: int):
        self.memory, self.handle = _symmetric(side, room)

    def open(self, stage: int, sends: Ends, recvs: Ends) -> tuple[Call, Call]:
        copies, handle = [], self.handle
        for peer, mine in sends:
            at = mine.data_ptr() - self.memory.data_ptr()
            theirs = handle.get_buffer(peer, self.memory.shape, torch.uint8)
            copies.append((peer, mine, theirs[at : at + mine.nbytes]))

        def send() -> None:
            for peer, mine, theirs in copies:
                theirs.copy_(mine, non_blocking=True)
                handle.put_signal(peer, channel=stage)

        def recv() -> None:
            for peer, _ in recvs:
                handle.wait_signal(peer, channel=stage)

        return send, recv


class Nvshmem:
    """Puts with a signal, to the same address at the peer. A signal must equal what is waited for,
    which a replayed graph meets too if the last value of a replay is not the first of the next: a
    graph has two messages of each stage or more. The ways of a stage go on counting."""

    def __init__(self, side: Teammate, room: int, stages: int):
        self.memory, handle = _symmetric(side, room)
        shape, self.index = (stages, side.count), side.index
        self.signals = handle.get_signal_pad(side.index, shape, dtype=torch.int64).zero_()
        self.sent, self.waited = [0] * stages, [0] * stages

    def open(self, stage: int, sends: Ends, recvs: Ends) -> tuple[Call, Call]:
        ops, flags = torch.ops.symm_mem, self.signals[stage].split(1)
        sent, waited, mine = self.sent, self.waited, flags[self.index]

        def send() -> None:
            sent[stage] += 1
            for peer, tensor in sends:
                ops.nvshmem_put_with_signal(tensor, mine, sent[stage], peer)

        def recv() -> None:
            waited[stage] += 1
            for peer, _ in recvs:
                ops.nvshmem_wait_for_signal(flags[peer], waited[stage], peer)

        return send, recv


class Nixl:
    """Of a pair with one stage: a notification does not say what it is of. The agents write into
    each other's memory, registered once; without NIXL's own thread, which makes it slower."""

    def __init__(self, side: Teammate, room: int, stages: int):
        api = importlib.import_module(f"{next(filter(importlib.util.find_spec, NIXL))}._api")
        config = api.nixl_agent_config(enable_prog_thread=False)
        self.memory, self.agent = _zeros(side, room), api.nixl_agent(f"side{side.index}", config)
        self.agent.register_memory([self.memory])
        self.kind = "VRAM" if side.device.type == "cuda" else "DRAM"
        self.mine = self.memory.data_ptr(), side.device.index or 0
        given = side.exchange((self.agent.get_agent_metadata(), *self.mine))
        metadata, *self.theirs = given[1 - side.index]
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def open(self, stage: int, sends: Ends, recvs: Ends) -> tuple[Call, Call]:
        agent, [(_, source)] = self.agent, sends
        at = source.data_ptr() - self.memory.data_ptr()
        ours, theirs = (
            agent.get_xfer_descs([(address + at, source.nbytes, gpu)], self.kind)
            for address, gpu in (self.mine, self.theirs)
        )
        transfer = agent.initialize_xfer("WRITE", ours, theirs, self.peer, b"sent")

        def send() -> None:
            state = agent.transfer(transfer, b"sent")
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"nixl: the state of a transfer is {state}")

        def recv() -> None:
            while not agent.get_new_notifs():
                pass

        return send, recv


OF = {"nccl": SendRecv, "gloo": SendRecv, "symm": Symmetric, "nvshmem": Nvshmem, "nixl": Nixl}


def join(way: str, side: Teammate, room: int, stages: int = 1) -> Any:
    """Makes this process one of several for a library, with so many bytes of `memory`, in which a
    tensor has the same place at the side that writes it and at the side that receives it. `open`
    returns send and recv of a stage; all sides open the same ones in the same order."""
    if way != "nixl":
        _group(way, side)
    library = OF[way](side, room, stages)
    side.sync()
    side.barrier()
    return library


def theirs(side: Teammate, sizes: Sizes) -> list[Route]:
    """Opens routes of the library that this process has joined. Each is used once, on the current
    stream: NCCL connects at its first use, and no kernel may be loaded while another one waits."""
    workers, servers, rank = side.workers, side.servers, side.rank
    rest, found = side.library.memory, []
    for stage, (push, pull) in enumerate(sizes):
        ends = workers * push, workers * (push + servers * pull)
        small = rest[: ends[0]].view(workers, push)
        large = rest[ends[0] : ends[1]].view(servers, workers, pull)
        rest = rest[ends[1] :]
        if side.is_worker:
            source, landing = small[rank : rank + 1], large[:, rank]
        else:
            source, landing = large[rank], small
        sends = list(zip(side.peers, source.expand(len(side.peers), -1), strict=True))
        recvs = list(zip(side.peers, landing, strict=True))
        found.append(Route(source, landing, *side.library.open(stage, sends, recvs)))
        found[-1].trip(side)
        side.sync()
        side.barrier()
    return found


def _group(way: str, side: Teammate) -> None:
    if way == "nvshmem":
        import torch.distributed._symmetric_memory as symm

        symm.set_backend("NVSHMEM")
    group: dict[str, Any] = {"rank": side.index, "world_size": side.count, "timeout": WAIT}
    group |= {"backend": "nccl", "device_id": side.device} if side.on_gpu else {"backend": "gloo"}
    dist.init_process_group(store=dist.PrefixStore("group", side.store), **group)
    dist.barrier()


def _zeros(side: Teammate, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=side.device)


def _symmetric(side: Teammate, count: int) -> tuple[torch.Tensor, Any]:
    """Returns zeros in symmetric memory, and what torch knows of them in all processes."""
    import torch.distributed._symmetric_memory as symm

    memory = symm.empty(count, dtype=torch.uint8, device=side.device)
    assert dist.group.WORLD is not None
    _kept.append((memory, symm.rendezvous(memory, dist.group.WORLD)))
    return memory.zero_(), _kept[-1][1]


class Rival(Teammate):
    """One of two processes. The host waits for its stream at each trip, as with push_pull, wait."""

    def join(self, by: str, room: int) -> None:
        """Joins the other. `room`: bytes of the largest message."""
        self.library = join(by, self, 2 * room)

    def prepare(self, case: Case) -> None:
        """Opens the route for the bytes of a case; a push is answered too."""
        [self.route] = theirs(self, [(case.moved[0], case.moved[1] or SMALL)])
        self.main = self.stream(-1)

    def verify(self, seed: int) -> None:
        """A round trip of new data into poisoned memory, compared byte by byte."""
        self.sequence += 1
        source, landing = self.route.source[0], self.route.landing[0]
        source.copy_(self.pattern.like(source, seed + self.index, self.sequence))
        landing.fill_(POISON)
        self.sync()
        self.barrier()
        self.trip()
        self.pattern.check(landing, seed + 1 - self.index, self.sequence, "what came")
        self.barrier()

    def trip(self) -> None:
        """One round trip; a worker's is over when the answer is there."""
        self.route.trip(self)
        self.settle()

    def measure(self, warmup: int, count: int) -> Figures:
        now, samples = time.perf_counter_ns, []
        with torch.cuda.stream(self.main):
            for _ in range(warmup + count):
                start = now()
                self.trip()
                samples.append(now() - start)
        return figures(samples[warmup:])


def beside(
    stack: contextlib.ExitStack,
    names: Sequence[str],
    raw: Way | None,
    gpus: tuple[int, int] | None,
    room: int,
    cores: tuple[int, int] | None,
) -> Iterator[Way]:
    """A way for each of the names; those that cannot be had know why. Their processes end with the
    stack. `gpus` and `cores` are those of our two sides; the largest message has `room` bytes."""
    for name in names:
        way = Way(name, None, raw, _unable(name, gpus), spare=True)
        if not way.reason:
            with way.tried():
                # A library may have threads that never sleep: not on the cores of ours.
                apart = os.sched_getaffinity(0) - set(cores or ())
                team = Team((1, 1), gpus, apart, Rival, ENVIRONMENT if gpus else {}, LIMIT)
                way.player = stack.enter_context(team)
                team.all("join", name, room)
        yield way


def _unable(way: str, gpus: tuple[int, int] | None) -> str | None:
    """Why a library cannot play, if it is known before it is tried."""
    if way not in (ON_GPUS if gpus else ON_CPU):
        return f"it takes tensors on {'the CPU' if gpus else 'GPUs'}"
    if gpus and gpus[0] == gpus[1]:
        return "it takes two GPUs, and there is one"
    if way == "nixl" and not any(importlib.util.find_spec(name) for name in NIXL):
        return f"no module of {', '.join(NIXL)} is installed"
    return None
