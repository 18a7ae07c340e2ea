"""The members of the cluster: what a worker, a server and the scheduler do until the end.

Every tensor that is pushed carries who made it, in which run of the process, and as which
exchange, and bytes that follow from that. A server compares all of them before it answers, with
other bytes, and a worker compares all of those. So bytes of another exchange, another peer or
an earlier run are seen.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from board import CLOSE, MEMBERS, OPEN, TAKEN_FOR_LOST, Board, Name, Shape

import fserver

KEYS = 4
DEPTH = 3  # push_pulls that a worker has under way
PAUSE = 0.0005  # seconds after each exchange: the others need the cores too
HEAD = 6 * 8  # bytes: rank, run, exchange, size, and of an answer the server's rank and run
PERIOD = 4099  # of the pattern
HANG_MS = 60_000  # the driver sees a hang before


class WrongBytes(Exception):
    """Bytes are not those of the exchange."""


def pattern(size: int, rank: int, run: int, seq: int) -> torch.Tensor:
    """The bytes that a worker pushes, shape [size], size a multiple of 8."""
    base = torch.arange(PERIOD, dtype=torch.int64) * 7919 + (rank * 131 + run * 31 + seq)
    x = base.to(torch.uint8).repeat(size // PERIOD + 1)[:size].contiguous()
    x[:HEAD].view(torch.int64)[:] = torch.tensor([rank, run, seq, size, -1, -1])
    return x


def answer_to(x: torch.Tensor, rank: int, run: int) -> torch.Tensor:
    """What server `rank` answers to x."""
    y = x + (rank + 1)
    y[:HEAD] = x[:HEAD]
    y[:HEAD].view(torch.int64)[4:] = torch.tensor([rank, run])
    return y


def head(x: torch.Tensor) -> list[int]:
    """Who made it, and what it is: the numbers at the start of x."""
    return x[:HEAD].clone().view(torch.int64).tolist()


class Member:
    """One process: the node that it has, and the row that it writes."""

    def __init__(
        self, board: Board, row: int, shape: Shape, name: Name, run: int, options: dict[str, Any]
    ):
        self.board, self.name, self.run, self.options = board, name, run, options
        self.row = board.rows[row]
        self.peers = shape.peers(name)
        self.rng = random.Random(str((name, run)))

    def live(self, work: Callable[[Any], None]) -> None:
        """Opens a node and works with it until the end, over again each time it is to close.

        A node that the driver has not closed ends the process with its error.
        """
        make = getattr(fserver, self.name.role.capitalize())
        while True:
            with make(connect=False, **self.options) as node:
                node.connect()
                self.begin()
                gate = threading.Thread(target=self.meet, args=(node,), daemon=True)
                if self.name.role != "scheduler":
                    gate.start()
                work(node)
                if not self.told():
                    node.stop()
                else:
                    self.row.closed_at = time.monotonic()
                    node.close()
            if gate.ident:
                gate.join()
            if self.board.sheet.quit:
                return
            while self.row.order != OPEN:
                time.sleep(0.001)
            self.row.order, self.run = 0, self.run + 1

    def begin(self) -> None:
        """The node is in the cluster."""
        self.row.barriers = 0
        self.row.met[:] = [0] * len(MEMBERS)
        self.row.run = self.run

    def told(self) -> bool:
        """Whether it is to close the node now."""
        return self.row.order == CLOSE

    def over(self) -> bool:
        """Whether the work ends: for this node or for all."""
        return self.told() or bool(self.board.sheet.quit)

    def meet(self, node: Any) -> None:
        """Barriers of all members, one after the other, beside the work."""
        while not self.over():
            self.row.waits_since = time.monotonic()
            try:
                node.barrier(True, True, timeout_ms=HANG_MS)
                self.row.barrier_at = time.monotonic()
                self.row.barriers += 1
            except fserver.PeerLostError as error:
                self.row.saw_loss(error)
            except fserver.ClosedError:
                return
            finally:
                self.row.waits_since = 0
            time.sleep(self.rng.uniform(0, 0.01))  # most of the time, all but one wait

    def wrong(self, text: str) -> None:
        """Says so, and goes on."""
        self.row.wrong += 1
        print(f"chaos: wrong bytes: {self.name}, run {self.run}: {text}", file=sys.stderr)

    # Roles

    def schedule(self, node: fserver.Scheduler) -> None:
        while not self.over():
            time.sleep(0.005)

    def ask(self, node: fserver.Worker) -> None:
        """Push_pulls, some under way at a time; each answer is compared."""
        flying: collections.deque[tuple[int, torch.Tensor, list[torch.Tensor]]]
        flying, seq = collections.deque(), 0
        while not self.over() or flying:
            if len(flying) < DEPTH and not self.over():
                size = 8 * self.rng.randint(HEAD // 8, 1 << self.rng.choice((5, 8, 12, 16)))
                x = pattern(size, self.name.rank, self.run, seq)
                # Of its own for each: after a failure, another server may still write to it.
                y = [torch.zeros(size, dtype=torch.uint8) for _ in self.peers]
                flying.append((node.push_pull([x], [seq % KEYS], y, [0]), x, y))
                seq += 1
                continue
            handle, x, y = flying.popleft()
            try:
                node.wait(handle, HANG_MS)
            except fserver.PeerLostError as error:
                self.row.saw_loss(error)
                time.sleep(0.001)
                continue
            good = True
            for server, got in zip(self.peers, y, strict=True):
                run = head(got)[5]
                if torch.equal(got, answer_to(x, server.rank, run)):
                    self.row.met[MEMBERS.index(server)] = run
                else:
                    good = False
                    self.wrong(f"{server} answered {head(got)} to {head(x)}")
            self.row.exchanges += good
            time.sleep(PAUSE)

    def answer(self, node: fserver.Server) -> None:
        """Compares what comes, and answers it."""
        runs: dict[int, int] = {}  # of each worker, the last that came
        recent: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=64)
        while not self.told():
            try:
                batch = node.get_batch(timeout_ms=50)
            except fserver.PeerLostError as error:
                self.row.saw_loss(error)
                time.sleep(0.001)
                continue
            except fserver.ClosedError:
                if self.board.sheet.quit:
                    return  # the workers have left
                raise
            if not batch:
                continue
            for worker, (handler, [x], [key]) in zip(self.peers, batch, strict=True):
                rank, run, seq, size, *_ = head(x)
                if (
                    (rank, size, key) != (worker.rank, len(x), seq % KEYS)
                    or run < runs.get(rank, 0)
                    or (rank, run, seq) in recent
                    or not torch.equal(x, pattern(size, rank, run, seq))
                ):
                    self.wrong(f"{worker} pushed {head(x)} as key {key}")
                runs[rank] = run
                recent.append((rank, run, seq))
                try:
                    node.respond([answer_to(x, self.name.rank, self.run)], handler)
                except fserver.PeerLostError as error:
                    self.row.saw_loss(error)
                    continue
                self.row.exchanges += 1
                self.row.met[MEMBERS.index(worker)] = run


def main(
    path: str,
    rows: int,
    row: int,
    shape: Shape,
    name: Name,
    run: int,
    options: dict[str, Any],
    log: str,
) -> None:
    """Life of a process. What it has to say goes to the file `log`."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 2)
    os.close(out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which closes the node
    torch.set_num_threads(1)
    member = Member(Board(path, rows), row, shape, name, run, options)
    work = {"scheduler": member.schedule, "worker": member.ask, "server": member.answer}
    try:
        member.live(work[name.role])
    except fserver.ClosedError as error:
        print(f"chaos: {name}, run {run}: {error}", file=sys.stderr)
        sys.exit(TAKEN_FOR_LOST)
