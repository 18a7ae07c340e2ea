"""What the table of plan.py is on these GPUs, by trying: channels of the same tensors are opened
one after the other, each used for some exchanges in a graph, and closed.

A side chooses how tensors come to it. So in the first half of the trials the tables of the servers
change and in the second half those of the workers, and each side takes the fastest of its own.
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
EXCHANGES, ROUNDS = 20, 9  # of a graph; of a trial
GAIN = 0.97  # of the time of TABLE: less is noise


def choose(seconds: Sequence[float]) -> Table:
    """The table to take, of those times of CANDIDATES."""
    best = min(range(len(CANDIDATES)), key=seconds.__getitem__)
    return CANDIDATES[best] if seconds[best] < GAIN * seconds[0] else TABLE


def tuned(open_trial: Callable[[str, Table], Channel], send_first: bool) -> Table:
    """Makes the trials; every peer does too.

    Args:
        open_trial: opens a channel, given what is to be added to its name, and a table.
        send_first: this side is a worker.

    Returns:
        What this side is to open the channel with. TABLE, if kernels do not carry it.
    """
    took: list[float] = []
    for number in range(2 * len(CANDIDATES)):
        of_worker, candidate = divmod(number, len(CANDIDATES))
        mine = bool(of_worker) is send_first
        table = CANDIDATES[candidate] if mine else TABLE
        try:
            trial = open_trial(f"~{number}", table)
        except TimeoutError as error:
            raise TimeoutError(f"{error} (and with tune=True on all sides or on none)") from error
        with trial as channel:
            if channel.path != "kernel":
                return TABLE
            seconds = _seconds(channel, send_first)
        if mine:
            took.append(seconds)
    return choose(took)


def _seconds(channel: Channel, send_first: bool) -> float:
    """Of an exchange, in a graph."""
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
    """Raises what has kept a message of a channel that kernels carry from coming. That a peer has
    closed its side since is nothing: it had all messages first."""
    if channel._side.status()[0]:
        channel.check()
