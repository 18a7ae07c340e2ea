"""What calls of a stream channel send, what they refuse, and how they let others go on.

Over a driver without a GPU: see lanes.py."""

from __future__ import annotations

import ctypes
import time
from itertools import product
from typing import Any

import torch
from lanes import (
    DRIVER,
    ENDED,
    ROWS,
    Side,
    exchange,
    on_gpus,
    over_driver,
    pair,
    refuses,
    released,
    run_check,
)
from nodes import LIMIT as WAIT
from nodes import open_cluster, together

import fserver
from fserver import _loader
from fserver.channel.plan import LANDING, PACKETS, PLACE


@over_driver(*product(("kernel", "copy"), ("own", "foreign")))
def test_whole_messages(mode: str, memory: str) -> None:
    """Data there and back, of tensors by all ways, in full and in part. Foreign memory is
    such that no IPC handle names, which is copied from a landing buffer."""
    on_gpus()
    torch.manual_seed(0)
    DRIVER.foreign = int(memory == "foreign")
    kinds = (torch.zeros(ROWS, 4), torch.zeros(3, dtype=torch.uint8), torch.zeros(300, 333))
    kinds += (torch.zeros(0, 7), torch.zeros(ROWS, 20001, dtype=torch.uint8))
    cluster = open_cluster(servers=2)
    x, y0, y1, z0, z1 = ([fresh(t) for t in kinds] for _ in range(5))
    keys = list(range(len(kinds)))
    options: dict[str, Any] = {"mode": mode, "timeout_ms": 1e3 * WAIT}
    w, *servers = together(
        [
            lambda: cluster.worker.channel(x, keys, [*y0, *y1], keys, **options),
            lambda: cluster.servers[0].channel(keys, z0, keys, **options),
            lambda: cluster.servers[1].channel(keys, z1, keys, **options),
        ]
    )
    ways = {e.kind for e in servers[0]._side.plan._incoming[0] if e.piece.bytes}
    large = LANDING if DRIVER.foreign else PLACE
    assert ways == ({large, PACKETS} if mode == "kernel" else {large})
    for rows in (None, [7, 2, 123, 0, 5], None):
        for t in (*x, *z0, *z1):
            t.copy_(fresh(t))
        w.send(rows)
        for s in servers:
            s.recv()
            arrived(x, s.incoming, s.rows[0], rows)
            s.send(rows)
        w.recv()
        for i, z in enumerate((z0, z1)):
            arrived(z, w.tensors[i], w.rows[i], rows)
    assert DRIVER.missed == 0
    assert (DRIVER.spinning, DRIVER.waiters) == (0, 0)  # what lands is waited for by one block
    cluster.close()


def fresh(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, like.shape).to(like.dtype)


def arrived(
    sent: list[torch.Tensor], got: list[torch.Tensor], told: torch.Tensor, rows: list[int] | None
) -> None:
    rows = rows or [len(t) for t in sent]
    assert told.tolist() == rows
    for a, b, n in zip(sent, got, rows, strict=True):
        assert torch.equal(a[:n], b[:n])


@over_driver()
def test_rows_after_an_error_sm() -> None:
    """A send() of all rows sends them, and says so, after one of fewer has failed."""
    size = 1 << 20  # in place, by flags
    w, _ = pair("kernel", size=size)
    everything = (ROWS, size)
    w.lane.send()
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == everything
    w.lane.recv()
    w.lane.send([3])
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == (3, 3 * size // ROWS)
    w.lane.recv()
    DRIVER.fail_launch = 1
    refuses(lambda: w.lane.send([3]), fserver.Error, "^channel: send: an error")
    w.lane.send()
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == everything


@over_driver()
def test_rows_after_an_error_ce() -> None:
    """The same of the copy engine."""
    w, s = pair("copy", count=2)
    exchange(w, s, 1)
    DRIVER.fail_copy = DRIVER.copies + 2
    refuses(lambda: w.lane.send([3, 4]), fserver.Error, "^channel: send: an error")
    assert s.rows() == [3, 0]
    w.lane.send()
    assert s.rows() == [ROWS, ROWS]
    s.lane.recv()
    s.lane.send([5, 6])
    assert w.rows() == [5, 6]


@over_driver()
def test_rows_of_graphs_ce() -> None:
    """A graph may be replayed before any message. From the first message of fewer rows on, all of
    them tell theirs."""
    w, s = pair("copy")
    exchange(w, s, 1)
    words, _ = s.plan.rows
    told = ctypes.c_uint64.from_address(words)
    w.lane.send([3])
    assert s.rows() == [3]
    s.lane.recv()
    s.lane.send()
    w.lane.recv()
    for i, capturing in enumerate((0, 1, 0, 1)):
        told.value = 5  # by a replay of another graph
        DRIVER.capturing = capturing
        w.lane.send()
        DRIVER.capturing = 0
        assert s.rows() == [ROWS]
        if i == 0:
            s.lane.recv()
            s.lane.send()
            w.lane.recv()


@over_driver()
def test_fewer_rows_after_a_graph_of_all_ce() -> None:
    """The graph does not tell its rows, because that takes time."""
    w, s = pair("copy")
    exchange(w, s, 1)
    DRIVER.capturing = 1
    w.lane.send()
    DRIVER.capturing = 0
    refuses(
        lambda: w.lane.send([3]),
        fserver.ConfigError,
        r"call send\(rows=\.\.\.\) once before the first capture$",
    )
    w.lane.send()


@over_driver("kernel", "copy")
def test_two_streams(mode: str) -> None:
    w, s = pair(mode)
    w.lane.send()
    s.lane.recv()
    s.lane.send()
    DRIVER.busy, DRIVER.current_stream = 1, 2
    done = DRIVER.launches, DRIVER.copies
    text = "^recv: the channel is still in use on another stream .synchronize that stream first"
    refuses(w.lane.recv, fserver.ConfigError, text)
    assert (DRIVER.launches, DRIVER.copies) == done
    DRIVER.current_stream = 1
    w.lane.recv()
    DRIVER.busy, DRIVER.current_stream = 0, 2  # that one has done all
    w.lane.send()
    s.lane.recv()
    s.lane.send()
    DRIVER.busy, DRIVER.current_stream = 1, 1
    DRIVER.capturing = 1  # who asks then ends the capture
    asked = DRIVER.asked
    w.lane.recv()
    assert DRIVER.asked == asked
    DRIVER.capturing = 0


@over_driver("kernel", "copy")
def test_turns_in_graphs(mode: str) -> None:
    """A graph may have one of the two calls alone, and a capture may fail between them."""
    w, s = pair(mode)
    refuses(w.lane.recv, fserver.ConfigError, r"^recv: call send\(\) first")
    DRIVER.capturing = 1
    w.lane.send()
    DRIVER.capturing = 0
    w.lane.send()  # that of the graph has not run
    refuses(s.lane.send, fserver.ConfigError, r"^send: call recv\(\) first")


@over_driver("kernel", "copy")
def test_wrong_rows(mode: str) -> None:
    w, s = pair(mode)
    w.out[0].fill(7)
    for rows, text in (
        ([4, 9, 9], "^send: rows has 3 numbers for 1 tensors: give one number for"),
        ([], "^send: rows has 0 numbers for 1 tensors: give one number for"),
        ([17], r"^send: rows\[0\] is 17, but the tensor has 16: give a"),
        ([1 << 40], r"^send: rows\[0\] is 1099511627776, but the tensor has 16: give a"),
    ):
        refuses(lambda rows=rows: w.lane.send(rows), fserver.ShapeError, text)
    for rows, text in (
        ([True], r"^send: rows\[0\] is True, want an int"),
        ([1.5], r"^send: rows\[0\] is 1.5, want an int"),
        (3, "^send: rows is 3, want "),
    ):
        refuses(lambda rows=rows: w.lane.send(rows), fserver.ConfigError, text)
    assert (DRIVER.launches, DRIVER.copies) == (0, 0)
    w.lane.send([4])  # it is still its turn


class Closes:
    """A number of rows that closes the lane when it is read, as another thread may then."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def __index__(self) -> int:
        self.side.lane.close()
        return 1


@over_driver("kernel", "copy")
def test_closed_while_rows_are_read(mode: str) -> None:
    w, _ = pair(mode)
    refuses(lambda: w.lane.send([Closes(w)]), fserver.ClosedError, "^send: the channel is closed")
    assert (DRIVER.launches, DRIVER.copies) == (0, 0)


@over_driver()
def test_threads_go_on_while_the_gpu_is_busy() -> None:
    """What the GPU does may wait for one of them."""
    w, s = pair("copy")
    released(w.lane.close)
    assert s.lane.status() == (0, 0)
    flag, seq = (fserver.map_pinned_tensor(torch.zeros(1, dtype=torch.int64), 0) for _ in "12")
    released(lambda: fserver.wait_flag(flag, seq))
    released(lambda: fserver.seq_add_one(seq))
    released(lambda: fserver.write_flag(flag, seq))
    assert DRIVER.unloaded == 0


@over_driver("kernel", "copy")
def test_threads_go_on_while_a_stream_is_full(mode: str) -> None:
    """The driver waits then for the GPU, and that for a thread: of the other side, say."""
    w, s = pair(mode)
    for side, other in ((w, s), (s, w)):
        released(side.lane.send)
        released(other.lane.recv)
    assert DRIVER.missed == 0


@over_driver("kernel", "copy")
def test_beside_a_capture(mode: str) -> None:
    """What opens and closes a channel does no harm to a capture that another thread makes in
    torch's default mode."""
    open_before = pair(mode)
    DRIVER.captures = 1
    open_now = pair(mode)
    if mode == "copy":
        exchange(*open_now, 1)  # and its threads look at the words
    for side in (*open_before, *open_now):
        side.lane.peek(side.plan.arena, 64)
        side.lane.finish()
    open_now[0].lane.close()
    del open_now, side  # and closed by that
    for side in open_before:
        side.end(ENDED)
    time.sleep(0.1)  # the threads fill the flags
    for side in open_before:
        side.lane.close()
    assert DRIVER.spoiled == 0


@over_driver()
def test_odd_words() -> None:
    def word() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def lost() -> torch.Tensor:
        t = word()
        t.untyped_storage().resize_(0)
        return t

    extension = _loader.load()
    for tensor, text in (
        (lost(), "set_word: word has lost its memory"),
        (word().to_sparse(), r"set_word: word has layout sparse: pass word.to_dense\(\)"),
        (word()._neg_view(), r"set_word: word is a negated view: pass word.resolve_neg\(\)"),
    ):
        refuses(lambda t=tensor: extension.set_word(t, 1), fserver.ConfigError, text)
    for i in (2, 128, 256, 2**40):  # not a number of 8 bits of it
        text = f"^map_pinned_tensor: device_index is {i}, want 0 to 1"
        refuses(lambda i=i: fserver.map_pinned_tensor(word(), i), fserver.ConfigError, text)
    DRIVER.gpus_shown = 0
    text = "^map_pinned_tensor: CUDA shows no GPU .see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    refuses(lambda: fserver.map_pinned_tensor(word(), 0), fserver.ConfigError, text)
    DRIVER.gpus_shown = 2
    seen = fserver.map_pinned_tensor(word(), 0)
    text = r"^map_pinned_tensor: tensor is on cuda:0, want a CPU tensor .*pin_memory\(\)"
    refuses(lambda: fserver.map_pinned_tensor(seen, 1), fserver.ConfigError, text)


if __name__ == "__main__":
    run_check(globals())
