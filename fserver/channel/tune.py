"""Measures which table of plan.py is the fastest on these GPUs. It opens trial channels of the same
tensors one after the other, replays a CUDA graph of some exchanges on each, and closes them.

The receiving side chooses how tensors are transferred. The first half of the trials varies the
tables of the servers, the second half those of the workers. Each side takes its own fastest table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fserver import _loader
from fserver.channel.plan import TABLE, Table
from fserver.errors import TimeoutError

if TYPE_CHECKING:
    from fserver.channel.channel import Channel

CANDIDATES = (
    TABLE,
    Table(2 << 20),  # packets, which take up twice the bytes
    *(Table(0, ((1 << 62, blocks),)) for blocks in (8, 16, 32, 64)),
)
EXCHANGES, ROUNDS = 20, 9  # exchanges in a graph; replays in a trial
GAIN = 0.97  # a table must take less than this part of TABLE's time; a smaller gain is noise


def choose(seconds: Sequence[float]) -> Table:
    """Returns the table to use, from the times of CANDIDATES."""
    best = min(range(len(CANDIDATES)), key=seconds.__getitem__)
    return CANDIDATES[best] if seconds[best] < GAIN * seconds[0] else TABLE


def tuned(open_trial: Callable[[str, Table], Channel], send_first: bool) -> Table:
    """Runs the trials. Every peer runs them at the same time.

    Args:
        open_trial: opens a channel, given a suffix for its name, and a table.
        send_first: whether this side is a worker.

    Returns:
        The table with which this side should open the channel. TABLE, if no kernels are used.
    """
    took: list[float] = []
    for number in range(2 * len(CANDIDATES)):
        of_worker, candidate = divmod(number, len(CANDIDATES))
        mine = bool(of_worker) is send_first
        table = CANDIDATES[candidate] if mine else TABLE
        try:
            trial = open_trial(f"~{number}", table)
        except TimeoutError as error:
            raise TimeoutError(f"{error} (set tune=True on all sides or on none)") from error
        with trial as channel:
            if channel.path != "kernel":
                return TABLE
            seconds = _seconds(channel, send_first)
        if mine:
            took.append(seconds)
    return choose(took)


def _seconds(channel: Channel, send_first: bool) -> float:
    """Returns the time of one exchange in a CUDA graph."""
    import torch

    calls = [channel.send] * bool(channel.outgoing) + [channel.recv] * bool(channel.incoming)
    if not send_first:
        calls.reverse()
    stream, settle = torch.cuda.Stream(channel.token.device), _loader.load().settle
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        for call in calls:
            call()
        settle(stream.device.index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(EXCHANGES):
                for call in calls:
                    call()
        took = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            graph.replay()
            settle(stream.device.index)
            took.append((time.perf_counter() - started) / EXCHANGES)
    whole(channel)
    return statistics.median(took)


def whole(channel: Channel) -> None:
    """Raises the error that has stopped a message of a channel of path "kernel". It is no error if
    a peer has closed its side meanwhile: that peer had received all messages before."""
    if channel._side.status()[0]:
        channel.check()
