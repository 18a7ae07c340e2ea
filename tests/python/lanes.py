"""A driver in the place of CUDA's, for tests of stream channels (csrc/lane*.cc) without a GPU: what
they do when something goes wrong. Each check runs in a process of its own, which finds this driver
first; tests/gpu/test_lane.py has the messages themselves."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forks
from nodes import LIMIT as WAIT
from nodes import Cluster, together

import fserver
from fserver import _loader
from fserver.channel import nvrtc, opening
from fserver.channel.gpu import GpuSide
from fserver.channel.plan import Piece, Plan

LIMIT = 60  # seconds for a check
HERE = Path(__file__).resolve().parent
CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "g++")
ROWS = 16
LOST, LATE = 1, 2  # of cs_channel.h
SECOND = 0x100  # of fakelane.c: another context of the first GPU
LARGE = ("launched_bytes", "wait_page", "wait_since", "wait_patience")  # of fakelane.c
UNSUPPORTED = 217  # of the driver: peer access
ENDED, PARTED = 1, 2  # what the engine writes into the word that ends a channel


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts processes that find our libcuda.so.1, and libfakeguard.so, which gives torch its
    streams."""
    for compiler in (CC, CXX):
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler}")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    home = Path(torch.__file__).parent
    torch_flags = ["-std=c++20", "-isystem", home / "include", f"-Wl,-rpath,{home / 'lib'}"]
    for command in (
        [CC, *flags, "-o", folder / "libcuda.so.1", HERE / "fakelane.c"],
        [
            CXX, *flags, *torch_flags, "-o", folder / "libfakeguard.so", HERE / "fakeguard.cc",
            f"-L{home / 'lib'}", "-lc10",
        ],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    forks = Forks(LD_LIBRARY_PATH=str(folder))
    yield forks
    forks.close()


def over(
    driver: Forks, check: Callable[..., None], *arguments: str, finalize: bool = False
) -> None:
    """Runs a function of a test file in a child, over the driver."""
    command = (check.__code__.co_filename, check.__name__, *arguments)
    done = driver.run(*command, limit=LIMIT, finalize=finalize)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout.endswith("checked\n"), done


def over_driver(
    *cases: str | tuple[str, ...], finalize: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a function, which runs in a child over the driver: once with each of the
    cases as its arguments."""
    each = [(case,) if isinstance(case, str) else case for case in cases or [()]]

    def made(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("case", each, ids=["-".join(case) or "once" for case in each])
        def test(driver: Forks, case: tuple[str, ...]) -> None:
            over(driver, check, *case, finalize=finalize)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__dict__["check"] = check
        return test

    return made


# What follows runs in the child.


def run_check(names: Mapping[str, Any]) -> None:
    """The program of a child: runs the function of a test file that over() has named."""
    DRIVER.install()
    check = names[sys.argv[1]]
    getattr(check, "check", check)(*sys.argv[2:])
    assert DRIVER.with_gil == 0
    print("checked")


class Driver:
    """The variables of fakelane.c, and of fakeguard.cc, as attributes."""

    def install(self) -> None:
        """Gives torch its streams."""
        _library("libfakeguard.so").install()

    def _at(self, name: str) -> Any:
        kind = ctypes.c_uint64 if name in LARGE else ctypes.c_int
        library = "libfakeguard.so" if name == "current_stream" else "libcuda.so.1"
        return kind.in_dll(_library(library), name)

    def drop_graph(self) -> None:
        """That of all captures so far."""
        _library("libcuda.so.1").drop_graph()

    def __getattr__(self, name: str) -> int:
        return self._at(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._at(name).value = value


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


DRIVER = Driver()


def at_rest() -> int:
    """What is held when the engine has opened the GPUs, whose contexts it keeps."""
    for index in range(2):
        _loader.load().Lane(index, b"", 1000.0, False).close()
    return DRIVER.held


class Tensor:
    """Memory in the place of a tensor."""

    def __init__(self, size: int) -> None:
        self._memory = ctypes.create_string_buffer(size + 4096)
        self.size, self.at = size, (ctypes.addressof(self._memory) + 4095) & ~4095

    def fill(self, value: int) -> None:
        ctypes.memset(self.at, value, self.size)

    @property
    def value(self) -> int:
        data = set(ctypes.string_at(self.at, self.size))
        assert len(data) == 1
        return data.pop()


class Side:
    """A lane, its plan, and the tensors that it sends and receives."""

    def __init__(self, index: int, mode: str, timeout_ms: float, size: int, count: int) -> None:
        image = b"kernels" if mode == "kernel" else b""
        self.lane = _loader.load().Lane(index, image, timeout_ms, False)
        self.out, self.into = ([Tensor(size) for _ in range(count)] for _ in range(2))
        outgoing, incoming = (
            [[Piece(t.at, ROWS, size // ROWS) for t in row]] for row in (self.out, self.into)
        )
        self.plan = Plan(self.lane, index, mode, outgoing, incoming, index == 0)

    def rows(self) -> list[int]:
        """As they were told of the newest message."""
        address, counts = self.plan.rows
        return list((ctypes.c_uint64 * sum(counts)).from_address(address))

    def end(self, word: int, why: int = 0, peer: int = 0) -> None:
        """As the engine does it, and then a kernel."""
        words = (ctypes.c_uint32 * 5).from_address(self.lane.abort_word)
        words[4] |= int(word == PARTED) << peer
        words[:2] = [word, why and why | peer << 8]


def pair(
    mode: str, *, timeout_ms: float = 10000, size: int = 64, count: int = 1, install: bool = True
) -> tuple[Side, Side]:
    """The worker's and the server's side of a channel with tensors both ways."""
    w, s = (Side(i, mode, timeout_ms, size, count) for i in (0, 1))
    told = s.plan.describe(0), w.plan.describe(0)
    for side, theirs in zip((w, s), told, strict=True):
        side.plan.attach(0, theirs)
        if install:
            side.plan.install()
    return w, s


def on_gpus() -> None:
    """Has channels of CPU tensors be those of two GPUs: a worker's is 0, a server's 1."""

    made = opening._gpu

    def side(_: Any, how: Any, out: Any, into: Any, send_first: bool) -> GpuSide:
        return made(torch.device("cuda", 0 if send_first else 1), how, out, into, send_first)

    def rows(self: GpuSide) -> list[torch.Tensor]:
        address, counts = self.plan.rows
        words = (ctypes.c_int64 * sum(counts)).from_address(address)
        return list(torch.frombuffer(words, dtype=torch.int64).split(counts))

    patches: list[tuple[Any, str, Any]] = [
        (opening, "_direct", lambda mode, device: mode != "host"),
        (opening, "_gpu", side),
        (GpuSide, "rows", rows),
        (nvrtc, "image", lambda source, arch: b"kernels"),
        (_loader.load().Lane, "hold", lambda lane, tensors: None),
    ]
    for where, name, what in patches:
        setattr(where, name, what)


def opened(cluster: Cluster, mode: str, name: str, count: int = 1) -> list[Any]:
    """A channel with so many tensors each way: the worker's side and those of the servers. Instead
    of one, what was raised."""
    n = len(cluster.servers)
    there, back = list(range(count)), list(range(count, 2 * count))
    x, *ys = ([torch.zeros(ROWS, 4) for _ in there] for _ in range(n + 1))

    def tried(call: Callable[..., Any], *tensors: Any) -> Any:
        try:
            return call(*tensors, mode=mode, name=name, timeout_ms=1e3 * WAIT)
        except Exception as error:
            return error

    def serve(server: Any) -> Callable[[], Any]:
        return lambda: tried(server.channel, there, [torch.zeros(ROWS, 4) for _ in back], back)

    return together(
        [
            lambda: tried(cluster.worker.channel, x, there, [t for y in ys for t in y], back),
            *map(serve, cluster.servers),
        ]
    )


def exchanged(w: Any, s: Any, value: float) -> None:
    """With mode "copy", or "host"."""
    x, y, z = w.outgoing[0], w.incoming[0], s.outgoing[0]
    x.fill_(value)
    w.send()
    s.recv()
    z.copy_(s.incoming[0] * 2)
    s.send()
    w.recv()
    assert y.tolist() == [[2 * value] * 4] * ROWS


def exchange(w: Side, s: Side, value: int) -> None:
    """With mode "copy"."""
    w.out[0].fill(value)
    w.lane.send()
    s.lane.recv()
    assert s.into[0].value == value
    s.out[0].fill(value + 1)
    s.lane.send()
    w.lane.recv()
    assert w.into[0].value == value + 1


def refuses(call: Callable[[], None], kind: type[fserver.Error], text: str) -> None:
    with pytest.raises(fserver.Error, match=text) as error:
        call()
    assert type(error.value) is kind, error.value


def released(call: Callable[[], None]) -> None:
    """The call lets another Python thread go on while the driver waits."""

    def goes_on() -> None:
        while not DRIVER.waiting:
            time.sleep(0.001)
        DRIVER.waits = 0

    thread = threading.Thread(target=goes_on, daemon=True)
    DRIVER.waits = 1
    thread.start()
    call()
    thread.join()
    assert DRIVER.waited_in_vain == 0
