"""Other libraries between sides that are threads here, with host memory and queues in place of what
takes GPUs: which bytes go where, and which signal is waited for."""

import ctypes
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from fserver.bench import libraries
from fserver.bench.graph import traffic

ROOM = 300
SIZES = [(300, 300), (64, 300), (300, 64), (8, 8)]
here = threading.local()


class Side:
    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, index, shape, given, meeting):
        self.index, self.count, self.given, self.barrier = index, sum(shape), given, meeting.wait
        self.workers, self.servers = shape
        self.is_worker = index < self.workers
        self.rank = index if self.is_worker else index - self.workers
        self.peers = range(self.workers, self.count) if self.is_worker else range(self.workers)
        self.library = None

    on_gpu = True
    sync = settle = lambda self: None

    def exchange(self, mine):
        self.given[self.index] = mine
        self.barrier()
        found = list(self.given)
        self.barrier()
        return found


class Symmetric:
    """Symmetric memory, as torch gives it and as NVSHMEM writes it."""

    def __init__(self, count=4):
        self.memory = [torch.zeros(4096, dtype=torch.uint8) for _ in range(count)]
        self.pads = [torch.full((16,), 7, dtype=torch.int64) for _ in range(count)]
        self.flags = {}  # by sender, receiver and channel
        self.changed = threading.Condition()

    def allocate(self, side, count):
        memory, me = self.memory[side.index][:count], side.index

        def flag(*key):
            return self.flags.setdefault(key, threading.Semaphore(0))

        def wait_signal(rank, channel):
            assert flag(rank, me, channel).acquire(timeout=10)

        handle = SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: self.memory[rank][: shape[0]],
            get_signal_pad=lambda rank, shape, dtype: self.pads[rank][: shape[0] * shape[1]].view(
                *shape
            ),
            put_signal=lambda rank, channel: flag(me, rank, channel).release(),
            wait_signal=wait_signal,
        )
        return memory, handle

    def nvshmem_put_with_signal(self, tensor, pad, value, peer):
        assert peer != here.index and pad.numel() == 1
        at = tensor.storage_offset() * tensor.element_size()
        data = tensor.reshape(-1).view(torch.uint8)
        with self.changed:
            self.memory[peer][at : at + data.numel()].copy_(data)
            self.pads[peer][pad.storage_offset()] = value
            self.changed.notify_all()

    def nvshmem_wait_for_signal(self, pad, value, peer):
        with self.changed:
            assert self.changed.wait_for(lambda: int(pad) == value, 10)


class Agent:
    """As NIXL has them; all that write into each other's memory."""

    all: dict[str, "Agent"] = {}

    def __init__(self, name, config):
        assert config == {"enable_prog_thread": False}
        self.name, self.notified, self.registered = name, queue.Queue(), []
        Agent.all[name] = self

    def register_memory(self, tensors):
        self.registered += tensors  # and kept, as the other may write still

    def get_agent_metadata(self):
        return self.name.encode()

    def add_remote_agent(self, metadata):
        return metadata

    def get_xfer_descs(self, rows, kind):
        assert kind == "VRAM"
        return rows

    def initialize_xfer(self, what, ours, theirs, peer, note):
        for agent, rows in ((self, ours), (Agent.all[peer], theirs)):
            [(address, n, _)] = rows
            [memory] = agent.registered
            assert 0 <= address - memory.data_ptr() <= memory.nbytes - n
        return ours[0], theirs[0], peer, iter(["PROC", "DONE"] * 10)

    def transfer(self, request, note):
        (source, n, _), (target, m, _), peer, states = request
        assert n == m
        ctypes.memmove(target, source, n)
        Agent.all[peer].notified.put(note)
        return next(states)

    def check_xfer_state(self, request):
        return next(request[3])

    def get_new_notifs(self):
        try:
            return {"peer": [self.notified.get(timeout=10)]}
        except queue.Empty:
            raise AssertionError("nothing came") from None


@pytest.fixture
def fakes(monkeypatch):
    symmetric = Symmetric()
    monkeypatch.setattr(libraries, "_group", lambda *_: None)
    monkeypatch.setattr(libraries, "_symmetric", symmetric.allocate)
    monkeypatch.setattr(torch.ops, "symm_mem", symmetric)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(libraries, "_zeros", lambda side, n: torch.zeros(n, dtype=torch.uint8))
    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda **options: options)
    modules = SimpleNamespace(
        import_module=lambda name: {"nixl_cu12._api": api}[name],
        util=SimpleNamespace(find_spec=lambda name: name == "nixl_cu12"),
    )
    monkeypatch.setattr(libraries, "importlib", modules)
    monkeypatch.setattr(Agent, "all", {})


def played(play, shape=(1, 1)):
    """Runs it on all sides."""
    count = sum(shape)
    given, meeting = [None] * count, threading.Barrier(count, timeout=10)

    def run(index):
        here.index = index
        try:
            return play(Side(index, shape, given, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("name", ["symm", "nvshmem", "nixl"])
def test_what_a_side_sends_comes_to_the_other(fakes, name):
    def play(side):
        side.library, wrong = libraries.join(name, side, 2 * ROOM), []
        opened = [way for sizes in SIZES for way in libraries.theirs(side, [sizes])]
        for turn, (sizes, way) in enumerate([*zip(SIZES, opened, strict=True)] * 3):
            assert (way.source.numel(), way.landing.numel())[:: -1 if side.index else 1] == sizes
            way.source.fill_(10 * turn + side.index)
            way.landing.fill_(255)
            side.barrier()
            calls = (way.send, way.recv)
            for call in calls[:: -1 if side.index else 1]:
                call()
            wrong.append(int((way.landing != 10 * turn + 1 - side.index).sum()))
            side.barrier()
        return wrong

    assert played(play) == [[0] * 12] * 2


@pytest.mark.parametrize("name", ["symm", "nvshmem"])
def test_stages_between_several(fakes, name):
    """Each message of a stage comes to the one peer it is for, and no other stage is touched."""
    shape, stages, sizes = (2, 2), 3, [(16, 32)] * 3

    def play(side):
        opened, wrong = traffic.opened(side, sizes, by=name), 0
        assert [way.landing.shape for way in opened] == [(2, 32 if side.is_worker else 16)] * stages
        for turn in range(3):
            for stage, way in enumerate(opened):
                way.source.fill_(20 * turn + 4 * stage + side.index)
                way.landing.fill_(100)
            side.barrier()
            for calls in ("send", "recv"):
                for way in opened:
                    getattr(way, calls)()
            for stage, way in enumerate(opened):
                for peer, came in zip(side.peers, way.landing, strict=True):
                    wrong += int((came != 20 * turn + 4 * stage + peer).sum())
            side.barrier()
        return wrong

    assert played(play, shape) == [0] * 4


def test_a_transfer_that_fails(fakes, monkeypatch):
    monkeypatch.setattr(Agent, "check_xfer_state", lambda *_: "ERR")

    def play(side):
        library = libraries.join("nixl", side, 2 * ROOM)
        ends = [(1 - side.index, library.memory[:64])]
        send, _ = library.open(0, ends, ends)
        with pytest.raises(RuntimeError, match="the state of a transfer is ERR"):
            send()

    played(play)
