"""What tests of benchmarks share: nodes that go wrong, most of them made of a pipe."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest
import randoms
import torch

from fserver import Link, Scheduler
from fserver.bench.crew import real_node

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"
)


def interruptible() -> None:
    """For a child: Ctrl-C counts, even if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def received(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def raw(t: torch.Tensor) -> bytes:
    return ctypes.string_at(t.data_ptr(), t.numel())


class Pipe:
    """One connection between the two fakes."""

    def __init__(self, conn: Connection):
        self.conn = conn
        self.count = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.conn.close()

    def links(self):
        return [Link("", 0, "", "pipe", "")]


class FakeWorker(Pipe):
    def push_pull(self, push_tensors, push_keys, pull_tensors, pull_keys, need_event):
        assert len(push_tensors) == len(push_keys) and len(pull_tensors) == len(pull_keys)
        self.pull = pull_tensors
        self.conn.send((push_keys, [raw(t) for t in push_tensors]))
        self.count += 1
        return self.count

    def wait(self, handler, timeout_ms):
        assert handler == self.count and self.conn.poll(timeout_ms / 1e3)
        for t, data in zip(self.pull, self.conn.recv(), strict=True):
            ctypes.memmove(t.data_ptr(), data, t.numel())


class FakeServer(Pipe):
    def get_batch(self, timeout_ms, at_least=None):
        if not self.conn.poll(timeout_ms / 1e3):
            return []
        keys, data = self.conn.recv()
        self.count += 1
        return [(self.count, [received(d) for d in data], keys)]

    def respond(self, tensors, handler, need_event):
        assert handler == self.count
        self.conn.send([raw(t) for t in tensors])


class CorruptingServer(FakeServer):
    """Changes one byte of every answer."""

    def respond(self, tensors, handler, need_event):
        changed = [t.clone() for t in tensors]
        for t in changed:
            t[-1] ^= 1
        super().respond(changed, handler, need_event)


class RepeatingServer(FakeServer):
    """Goes on answering with what it answered third."""

    def respond(self, tensors, handler, need_event):
        if handler <= 3:
            self.kept = [t.clone() for t in tensors]
        super().respond(self.kept, handler, need_event)


class LeakingServer(FakeServer):
    """Keeps 64 KiB for every request: more than an allocator has lying about."""

    def respond(self, tensors, handler, need_event):
        self.kept = getattr(self, "kept", [])
        self.kept.append(bytearray(b"x" * 65536))
        super().respond(tensors, handler, need_event)


class HoardingServer(FakeServer):
    """Opens a file for every request."""

    def respond(self, tensors, handler, need_event):
        self.files = getattr(self, "files", [])
        self.files.append(os.open("/dev/null", os.O_RDONLY))
        super().respond(tensors, handler, need_event)


class OpeningServer(FakeServer):
    """Opens a scheduler for every request, which is memory of the engine."""

    def respond(self, tensors, handler, need_event):
        self.nodes = getattr(self, "nodes", [])
        self.nodes.append(Scheduler(scheduler="127.0.0.1:0", connect=False))
        super().respond(tensors, handler, need_event)


def worker(place):
    host, port = place.scheduler.split(":")
    end = time.monotonic() + 60
    while True:
        try:
            return FakeWorker(Client((host, int(port))))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)  # the server is not there yet


def server(place, kind=FakeServer):
    host, port = place.scheduler.split(":")
    with Listener((host, int(port))) as listener:
        return kind(listener.accept())


def hoarding_server(place):
    return server(place, HoardingServer)


def opening_server(place):
    return server(place, OpeningServer)


def leaking_server(place):
    return server(place, LeakingServer)


def corrupting_server(place):
    return server(place, CorruptingServer)


def dying_server(place):
    os._exit(9)


class CorruptingNode:
    """A server of fserver that changes a byte of each answer from the tenth on."""

    def __init__(self, node):
        self._node = node
        self._answers = 0

    def __getattr__(self, name):
        return getattr(self._node, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._node.__exit__(*error)

    def respond(self, tensors, handler, need_event):
        for t in tensors:
            data = randoms.as_bytes(t)
            self._answers += len(data) > 0
            if self._answers >= 10 and len(data):
                data[len(data) // 2] ^= 1
        self._node.respond(tensors, handler, need_event)


def corrupting_node(place):
    return CorruptingNode(real_node(place))


def written(path: Path, name: str) -> list[dict]:
    """The rows of a file, after a look at the rest."""
    got = json.loads(path.read_text())
    assert got["bench"] == name and got["machine"]["cpu"] and got["command"]
    return got["rows"]
