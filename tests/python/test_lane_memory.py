"""The memory of stream channels: when it is given back, and what happens without it.

Over a driver without a GPU: see lanes.py."""

from __future__ import annotations

import gc
import threading
import time
from itertools import product
from typing import Any

import torch
from lanes import (
    DRIVER,
    ROWS,
    UNSUPPORTED,
    Side,
    at_rest,
    exchange,
    exchanged,
    on_gpus,
    opened,
    over_driver,
    pair,
    refuses,
    released,
    run_check,
)
from nodes import LIMIT as WAIT
from nodes import eventually, open_cluster, together

import fserver
from fserver.channel import channel as channels
from fserver.channel import opening, parting
from fserver.channel.gpu import _Words


@over_driver()
def test_memory_is_put_off() -> None:
    """A lane gives nothing back while a stream of the process may wait for another lane, or for a
    flag: the driver would keep all others from the GPU until that wait is over."""
    at_rest()
    flag, seq = (fserver.map_pinned_tensor(torch.zeros(1, dtype=torch.int64), 0) for _ in "12")
    fserver.wait_flag(seq, seq)  # loads kernels, and has a page of pinned memory, for good
    before = DRIVER.held
    first, second = pair("copy"), pair("copy")
    for w, s in (first, second):
        exchange(w, s, 1)
    fserver.wait_flag(flag, seq)
    held = DRIVER.held
    DRIVER.waits = 1
    for side in first:
        side.lane.close()
    assert (DRIVER.waiting, DRIVER.waited_in_vain) == (0, 0)
    DRIVER.waits = 0
    assert before < DRIVER.held <= held
    exchange(*second, 2)
    for side in second:
        side.lane.close()
    assert DRIVER.held > before
    del seq
    time.sleep(0.05)
    assert DRIVER.held > before
    del flag
    end = time.monotonic() + WAIT
    while DRIVER.held > before and time.monotonic() < end:
        time.sleep(0.001)
    assert DRIVER.held == before


@over_driver()
def test_what_is_put_off_makes_room() -> None:
    """Where memory is short, and where it lies at addresses of a peer that are used again."""
    stays = pair("copy")
    for side in pair("copy"):
        side.lane.close()
    made: list[tuple[Side, Side]] = []
    for what in ("full", "full_host"):
        setattr(DRIVER, what, 1)
        released(lambda: made.append(pair("copy")))
        assert getattr(DRIVER, what) == 0
    w, s = made[1]
    exchange(w, s, 1)
    told = {**s.plan.describe(0), "proof": ""}
    for again in (0, 1):
        DRIVER.taken = again
        x = Side(0, "copy", 10000, 64, 1)
        x.plan.attach(0, told)
        x.lane.close()
    assert DRIVER.taken == 0
    exchange(*stays, 2)


@over_driver()
def test_no_pinned_memory() -> None:
    w, _ = pair("copy")
    DRIVER.fail_host = 1
    text = "allocate pinned memory: out of memory .*open fewer channels, or raise ulimit -l"
    refuses(lambda: w.lane.peek(w.plan.arena, 64), fserver.Error, text)
    refuses(lambda: pair("copy"), fserver.Error, text)


@over_driver(*product(("kernel", "copy"), ("close", "collect")))
def test_a_peer_that_has_not_closed(mode: str, how: str) -> None:
    """It may still write to the memory of a side that is closed: its graph may be replayed. Nobody
    opens the next channel of the name before it has closed its side."""
    on_gpus()
    channels.PARTING_S = 0.1
    cluster = open_cluster()
    before = at_rest()
    w, s = opened(cluster, mode, "it")
    held = DRIVER.held
    if how == "close":
        s.close()
    del s
    gc.collect()
    parting.sweep()
    assert DRIVER.held == held > before
    keys, out = [0], [torch.zeros(ROWS, 4)]
    refuses(
        lambda: cluster.server.channel(keys, out, [1], name="it", timeout_ms=100),
        fserver.TimeoutError,
        "a peer has not closed its side of the earlier channel 'it' within timeout_ms=100",
    )
    w.close()
    eventually(lambda: parting.sweep() or DRIVER.held == before)
    again = opened(cluster, mode, "it")
    assert [ch.path for ch in again] == [mode] * 2
    cluster.close()
    eventually(lambda: parting.sweep() or DRIVER.held == before)


@over_driver("close", "collect")
def test_rows_that_are_still_there(how: str) -> None:
    """The tensors of the numbers of rows are memory of the channel."""
    on_gpus()
    cluster = open_cluster()
    before = at_rest()
    w, s = opened(cluster, "copy", "it")
    words = _Words(w._side.lane, 0, 1)
    w._side._words.add(words)
    if how == "close":
        together([w.close, s.close])
    del w, s
    gc.collect()
    eventually(lambda: parting.sweep() or len(parting._kept) == 1)
    assert DRIVER.held > before
    del words
    eventually(lambda: parting.sweep() or DRIVER.held == before)
    cluster.close()


REMEDIES = {
    "fail_alloc": "torch.cuda.empty_cache()",
    "fail_host": "open fewer channels, or raise ulimit -l",
    "fail_load": "torch.cuda.empty_cache()",
    "fail_stream": "torch.cuda.empty_cache()",
}


@over_driver(
    *product(("copy",), ("fail_alloc", "fail_host", "fail_stream"), ("worker", "server")),
    *product(("kernel",), ("fail_load",), ("worker", "server")),
)
def test_no_memory(mode: str, what: str, who: str) -> None:
    """One side has none: both say so, nothing is kept, and the next channel opens."""
    on_gpus()
    pair = open_cluster()
    exchanged(*opened(pair, "host", "before"), 1)
    before = at_rest()
    setattr(DRIVER, what, 1 if who == "worker" else 2)
    errors = dict(zip(("worker", "server"), opened(pair, mode, "none"), strict=True))
    mine = errors.pop(who)
    (told,) = errors.values()
    assert type(mine) is fserver.Error
    assert "out of memory" in str(mine) and REMEDIES[what] in str(mine)
    assert f"{who} 0 refuses: {mine}" in str(told)
    assert DRIVER.held == before
    setattr(DRIVER, what, 0)
    w, s = opened(pair, mode, "none")  # its name and its keys are free
    if mode == "copy":
        exchanged(w, s, 2)
    pair.close()
    assert DRIVER.held == before


@over_driver("kernel", "copy")
def test_one_server_on_another_host(mode: str) -> None:
    """All go through the engine then: the other server learns it from the worker, and lets go of
    what it had for the GPU."""
    on_gpus()
    cluster = open_cluster(servers=2)
    before = at_rest()
    far = threading.local()
    call = cluster.servers[1].channel

    def from_afar(*args: Any, **options: Any) -> Any:
        far.host = "cuda@there"
        return call(*args, **options)

    cluster.servers[1].channel = from_afar  # type: ignore[method-assign]
    opening._place = lambda device: getattr(far, "host", "cuda@here")
    w, *servers = opened(cluster, mode, "it")
    for channel in (w, *servers):
        assert channel.path == "host", channel
        assert channel.reason == "worker 0 and its server are on different hosts"
    assert DRIVER.held == before

    def serve(s: Any, factor: int) -> None:
        s.recv()
        s.outgoing[0].copy_(s.incoming[0] * factor)
        s.send()

    for value in (1.0, 2.0):
        w.outgoing[0].fill_(value)
        calls = [lambda i=i, s=s: serve(s, i + 2) for i, s in enumerate(servers)]
        together([lambda: (w.send(), w.recv()), *calls])
        assert [float(t[0][0]) for t in w.incoming] == [2 * value, 3 * value]
    together([ch.close for ch in (w, *servers)])
    cluster.close()


@over_driver("kernel", "copy")
def test_gpus_without_peer_access(mode: str) -> None:
    """Of one process, and of two."""
    on_gpus()
    pair = open_cluster()
    before = at_rest()
    DRIVER.no_access = 1
    errors = opened(pair, mode, "none")
    for error in errors:
        assert type(error) is fserver.ConfigError, error
        assert "gpu 0 cannot use the memory of gpu 1: no peer access" in str(error)
        assert 'use mode="host"' in str(error)
    assert str(errors[0]) in str(errors[1])  # the server is told
    assert DRIVER.held == before
    w, s = opened(pair, "host", "none")  # as it says
    exchanged(w, s, 1)
    pair.close()

    w, s = (Side(i, mode, 10000, 64, 1) for i in (0, 1))
    told = {**s.plan.describe(0), "device": 5, "proof": ""}
    DRIVER.fail_import = UNSUPPORTED
    refuses(
        lambda: w.plan.attach(0, told),
        fserver.ConfigError,
        "gpu 0 cannot use the memory of gpu 5 of peer 0, as its process counts: no peer access .*"
        'use mode="host"',
    )
    w.lane.close()
    s.lane.close()
    assert DRIVER.held == before


@over_driver()
def test_old_driver() -> None:
    """Neither channels nor flags use it."""
    DRIVER.old = 1
    word = torch.zeros(1, dtype=torch.int64)
    for name, call in (
        ("map_pinned_tensor", lambda: fserver.map_pinned_tensor(word, 0)),
        ("channel", lambda: pair("copy")),
    ):
        text = f"^{name}: cannot use a GPU: this driver supports CUDA 11.6, want 11.7 or later "
        refuses(call, fserver.ConfigError, text + r"\(install an NVIDIA driver for CUDA 11.7")


if __name__ == "__main__":
    run_check(globals())
