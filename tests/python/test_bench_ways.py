"""Others' ways between two sides, here two threads, with host memory and queues in place of what
takes GPUs: which bytes go where, and which signal is waited for."""

import ctypes
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from fserver.bench import ways

ROOM = 300
SIZES = [(300, 300), (64, 300), (300, 64), (8, 8)]
here = threading.local()


class Side:
    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, index, links, meeting):
        self.index, self.links, self.barrier = index, links, meeting.wait

    def exchange(self, mine):
        self.links[1 - self.index].put(mine)
        return self.links[self.index].get(timeout=10)


class Symmetric:
    """Symmetric memory, as torch gives it and as NVSHMEM writes it."""

    def __init__(self):
        self.memory = [torch.zeros(2048, dtype=torch.uint8) for _ in range(2)]
        self.pads = [torch.full((4,), 7, dtype=torch.int64) for _ in range(2)]
        self.flags = [threading.Semaphore(0) for _ in range(2)]
        self.changed = threading.Condition()

    def allocate(self, count, device):
        memory, me = self.memory[here.index][:count], here.index
        handle = SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: self.memory[rank][: shape[0]],
            get_signal_pad=lambda rank, shape, dtype: self.pads[rank][: shape[0]],
            put_signal=lambda rank, channel: self.flags[rank].release(),
            wait_signal=lambda rank, channel: self.flags[me].acquire(timeout=10),
        )
        return memory, handle

    def nvshmem_put_with_signal(self, tensor, pad, value, peer):
        assert peer == 1 - here.index and pad.numel() == 1
        at = tensor.storage_offset()
        with self.changed:
            self.memory[peer][at : at + tensor.numel()].copy_(tensor)
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
            first = {t.data_ptr(): t.numel() for t in agent.registered}
            assert n <= first[address]
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
    monkeypatch.setattr(ways.others, "join", lambda *_: None)
    monkeypatch.setattr(ways.others, "symmetric", symmetric.allocate)
    monkeypatch.setattr(torch.ops, "symm_mem", symmetric)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ways, "_empty", lambda side, n: torch.zeros(n, dtype=torch.uint8))
    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda **options: options)
    modules = SimpleNamespace(
        import_module=lambda name: {"nixl_cu12._api": api}[name],
        util=SimpleNamespace(find_spec=lambda name: name == "nixl_cu12"),
    )
    monkeypatch.setattr(ways, "importlib", modules)
    monkeypatch.setattr(Agent, "all", {})


def both(play):
    """Runs it on both sides."""
    links, meeting = [queue.Queue(), queue.Queue()], threading.Barrier(2, timeout=10)

    def run(index):
        here.index = index
        return play(Side(index, links, meeting))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


@pytest.mark.parametrize("name", ["symm", "nvshmem", "nixl"])
def test_what_a_side_sends_comes_to_the_other(fakes, name):
    def play(side):
        make, wrong = ways.join(name, side, ROOM), []
        opened = [make(*(sizes[::-1] if side.index else sizes)) for sizes in SIZES]
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

    assert both(play) == [[0] * 12] * 2


def test_a_transfer_that_fails(fakes, monkeypatch):
    monkeypatch.setattr(Agent, "check_xfer_state", lambda *_: "ERR")

    def play(side):
        way = ways.join("nixl", side, ROOM)(64, 64)
        with pytest.raises(RuntimeError, match="the state of a transfer is ERR"):
            way.send()

    both(play)


def test_no_nixl(fakes, monkeypatch):
    assert ways.missing("nixl") is None
    monkeypatch.setattr(ways.importlib.util, "find_spec", lambda name: None)
    assert ways.missing("nixl") == "no module of nixl_cu13, nixl_cu12, nixl is installed"
    assert ways.missing("nccl") is None and ways.missing("gloo") is None
