"""Kills the members of a cluster at random and starts them again, while push_pulls go on.

    python tests/chaos/chaos.py --kills 50 --seed 7

Workers, servers and a scheduler, each a process of its own, exchange tensors and compare every
byte, in clusters of several shapes, with calls that raise PeerLostError and with calls that wait
for the successor. The seed says who is killed, when and how. Counted are hangs, wrong bytes,
processes that end without being killed, the time until everybody who waits for the lost one
knows, and the time from the start of its successor until everybody has made an exchange with it
and all have met in a barrier. The exit status is 1 if a count is not 0 or a time is over its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from board import (
    CLOSE,
    MEMBERS,
    OPEN,
    SHAPES,
    TAKEN_FOR_LOST,
    Board,
    Name,
    Row,
    Shape,
    enter,
)

from fserver.bench.errors import BenchError
from fserver.bench.processes import Child
from fserver.percentiles import percentile

HANG = 20.0  # seconds after which what is waited for will not come
START = 120.0  # the same for the first processes, which import torch

WAYS = {
    "kill": "kill -9",
    "term": "SIGTERM, which closes the node",
    "close": "the node is closed, and another one opened in the same process",
    "freeze": "SIGSTOP until it is taken for lost; it runs on when it has a successor",
    "both": "kill -9 of two at the same time",
}


@dataclass(frozen=True)
class Limits:
    """Times in seconds, which the command line can change."""

    known: float  # of a member that is stopped, from the time-out of heartbeats
    rejoined: float
    heartbeat: float  # PS_HEARTBEAT_TIMEOUT

    @property
    def hang(self) -> float:
        """Longer than every limit, so that a time over its limit is measured."""
        return max(HANG, 2 * (self.heartbeat + self.known), 2 * self.rejoined)


@dataclass(frozen=True)
class Kill:
    """One turn."""

    shape: Shape
    mode: str  # on_peer_lost
    way: str
    victims: tuple[Name, ...]
    at: float  # seconds after the turn before
    pause: float  # seconds until the restart, where nobody needs to know before


class Hang(Exception):
    """Something did not happen."""


def plan(kills: int, seed: int) -> list[Kill]:
    """All turns: as many for each shape and mode, as far as the number allows."""
    rng = random.Random(seed)
    clusters = [(shape, mode) for mode in ("raise", "wait") for shape in SHAPES]
    turns: list[Kill] = []
    for i, (shape, mode) in enumerate(clusters):
        left = kills * (i + 1) // len(clusters) - kills * i // len(clusters)
        while left:
            way = rng.choices(list(WAYS), weights=[8, 3, 3, 3, 3])[0]
            if way == "both" and left == 1:
                way = "kill"
            victims = rng.sample(shape.members(), 2 if way == "both" else 1)
            pause = rng.choice((0.0, 0.05, 0.3))
            turns.append(Kill(shape, mode, way, tuple(victims), rng.uniform(0, 0.2), pause))
            left -= len(victims)
    return turns


class Process(Child):
    """A process of the cluster, and its row."""

    def __init__(
        self, cluster: Cluster, row: int, name: Name, run: int, options: dict[str, Any], log: Path
    ):
        board = cluster.board
        self.member, self.row, self.started = name, board.rows[row], time.monotonic()
        args = board.path, board.count, row, cluster.shape, name, run, options, str(log)
        super().__init__(str(name), enter, *args)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self) -> int | None:
        """Its exit status, once it has ended."""
        return self.process.exitcode

    def join(self, timeout: float) -> None:
        self.process.join(timeout)


class Cluster:
    """The processes of one shape in one mode."""

    def __init__(
        self,
        shape: Shape,
        mode: str,
        transport: str,
        board: Board,
        folder: Path,
        port: int,
        limits: Limits,
    ):
        self.limits = limits
        self.shape, self.mode, self.board, self.folder = shape, mode, board, folder
        self.old: list[Process] = []  # that were stopped and have a successor
        board.sheet.quit = 0
        self.options: dict[str, Any] = {
            "scheduler": f"127.0.0.1:{port}",
            "workers": shape.workers,
            "servers": shape.servers,
            "group_size": shape.group_size,
            "transport": transport,
            "on_peer_lost": mode,
            "init_timeout": START,
            "settings": {
                "STEPMESH_BACKEND": "CPU",  # also where there are GPUs
                "PS_HEARTBEAT_INTERVAL": "0.3",
                "PS_HEARTBEAT_TIMEOUT": str(limits.heartbeat),
                "FSERVER_STOP_TIMEOUT": str(limits.hang),
            },
        }
        self.members: dict[Name, Process] = {}
        self.runs = dict.fromkeys(shape.members(), 0)

    def open(self) -> None:
        for name in self.shape.members():
            self.start(name)
        self.wait_for(self.whole, "the cluster is not complete", limit=START)

    def start(self, name: Name) -> None:
        """Starts the next run of a member."""
        self.runs[name] += 1
        row = next(self.board.free)
        group, gpu = divmod(name.rank, self.shape.group_size)
        options = {**self.options, "node_rank": group, "gpu": gpu}
        log = self.folder / f"{self.shape.name}-{self.mode}-{name}-{self.runs[name]}"
        process = Process(self, row, name, self.runs[name], options, log)
        self.members[name] = process

    def rows(self) -> dict[Name, Row]:
        """Of those that exchange tensors."""
        return {name: p.row for name, p in self.members.items() if name.role != "scheduler"}

    def wait_for(
        self,
        met: Callable[[], bool],
        otherwise: str,
        but: tuple[Name, ...] = (),
        limit: float | None = None,
    ) -> float:
        """Waits until met; gives the time. All processes run meanwhile, but those named.

        Raises:
            Hang: it is not met in time.
            BenchError: a process ended.
        """
        limit = self.limits.hang if limit is None else limit
        end = time.monotonic() + limit
        while not met():
            if time.monotonic() > end:
                raise Hang(f"{otherwise} after {limit:g} s")
            for name, process in self.members.items():
                if name not in but and process.ended() is not None:
                    process.get(0)
            time.sleep(0.001)
        return time.monotonic()

    def whole(self) -> bool:
        """Everybody has made an exchange with the present run of its peers, and all have met
        since the last of them started."""
        rows = self.rows()
        last = max(p.started for p in self.members.values())
        return all(
            row.run == self.runs[name] and row.barriers and row.barrier_at > last
            and all(
                row.met[MEMBERS.index(peer)] == self.runs[peer] for peer in self.shape.peers(name)
            )
            for name, row in rows.items()
        )  # fmt: skip

    def turn(self, kill: Kill) -> dict[str, Any]:
        """One turn. Gives what was measured, in seconds."""
        time.sleep(kill.at)
        rows = self.rows()
        for row in rows.values():
            row.lost_at[:] = [0.0] * len(MEMBERS)
        gone = [self.members[name] for name in kill.victims]
        stops_at = time.monotonic()
        self.old = gone
        self.strike(kill, gone)
        late = self.limits.heartbeat if kill.way == "freeze" else 0.0
        lost = [MEMBERS.index(name) for name in kill.victims]

        def knew() -> dict[Name, float]:
            return {
                name: min(row.lost_at[i] for i in lost if row.lost_at[i]) - stops_at - late
                for name, row in rows.items()
                if name not in kill.victims and any(row.lost_at[i] for i in lost)
            }

        def all_know() -> bool:
            known = knew()
            # A barrier ends with the scheduler, unless it was called when that was gone: then it
            # waits for the next one. Nobody can tell the two apart from outside.
            free = any(name.role == "scheduler" for name in kill.victims)
            over = time.monotonic() - stops_at - late > 0.2
            return all(
                name in known or free and (over or not 0 < row.waits_since < stops_at)
                for name, row in rows.items()
                if name not in kill.victims
            )

        known: dict[Name, float] = {}  # before its successor is there
        if self.mode == "raise":
            self.wait_for(all_know, "not everybody knows", kill.victims)
            known = knew()
        else:
            time.sleep(kill.pause)
        for process in gone:
            # It has the port, or answers for its rank until it has left.
            if (process.member.role == "scheduler" and kill.way != "close") or kill.way == "term":
                if kill.way == "freeze":
                    process.close()
                    late = 0.0
                process.join(self.limits.hang)
        began = time.monotonic()
        self.restart(kill, gone)
        began = max(began, stops_at + late)
        rejoined = self.wait_for(self.whole, "not everybody has met the successor") - began
        if kill.way == "freeze" and gone[0].ended() is None:
            gone[0].signal(signal.SIGCONT)
        if kill.way != "close":
            for process in gone:
                process.join(self.limits.hang)
                self.check_end(kill, process)
        return {
            "shape": kill.shape.name,
            "mode": kill.mode,
            "way": kill.way,
            "victims": [str(name) for name in kill.victims],
            "known_s": {str(name): round(max(s, 0.0), 6) for name, s in known.items()},
            "rejoined_s": round(rejoined, 6),
        }

    def strike(self, kill: Kill, gone: list[Process]) -> None:
        """Does it to them."""
        number = {"term": signal.SIGTERM, "freeze": signal.SIGSTOP}.get(kill.way, signal.SIGKILL)
        for process in gone:
            if kill.way == "close":
                process.row.closed_at, process.row.order = 0.0, CLOSE
                self.wait_for(
                    lambda p=process: p.row.closed_at > 0, f"{process.name} is not closed"
                )
            else:
                process.signal(number)

    def restart(self, kill: Kill, gone: list[Process]) -> None:
        for process in gone:
            if kill.way == "close":
                self.runs[process.member] += 1
                process.started, process.row.order = time.monotonic(), OPEN
            else:
                self.start(process.member)

    def check_end(self, kill: Kill, process: Process) -> None:
        """One that was killed has ended as it should."""
        status = process.ended()
        if status is None:
            raise Hang(f"{process.name}, which was to end by {WAYS[kill.way]}, runs on")
        good = {"term": 0, "freeze": TAKEN_FOR_LOST}.get(kill.way, -signal.SIGKILL)
        if status not in (good, -signal.SIGKILL):
            raise BenchError(f"{process.name} has ended with status {status} by {WAYS[kill.way]}")

    def stop(self) -> None:
        """All leave together."""
        self.board.sheet.quit = 1
        for process in self.members.values():
            process.join(self.limits.hang)
            if process.ended() is None:
                raise Hang(f"{process.name} has not left")
            if process.ended() != 0:
                process.get(0)

    def dump(self) -> None:
        """Has all processes write where they are, in Python and in Go, to their logs."""
        for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGSEGV):
            for process in {*self.members.values(), *self.old}:
                if process.ended() is None:
                    process.signal(number)
            time.sleep(1)

    def end(self) -> None:
        for process in {*self.members.values(), *self.old}:
            process.close()


def run(
    kills: list[Kill], transport: str, board: Board, folder: Path, limits: Limits
) -> dict[str, Any]:
    """All turns, with a new cluster for each mode and after a failure."""
    results: dict[str, Any] = {"turns": [], "hangs": [], "ended": []}
    cluster = None
    left = list(kills)
    with port() as number:
        while left or cluster:
            try:
                if cluster is None:
                    cluster = Cluster(
                        left[0].shape, left[0].mode, transport, board, folder, number, limits
                    )
                    cluster.open()
                elif left and (left[0].shape, left[0].mode) == (cluster.shape, cluster.mode):
                    kill = left.pop(0)
                    results["turns"].append(cluster.turn(kill))
                    print(show(len(results["turns"]), results["turns"][-1]), flush=True)
                else:
                    cluster.stop()
                    cluster.end()
                    cluster = None
            except (Hang, BenchError) as error:
                results["hangs" if isinstance(error, Hang) else "ended"].append(str(error))
                turn = kills[len(kills) - len(left) - 1]
                print(f"chaos: {turn}: {error}", file=sys.stderr)
                cluster.dump()
                cluster.end()
                cluster = None
                if len(results["hangs"]) + len(results["ended"]) >= 3:
                    break
            except BaseException:
                if cluster is not None:
                    cluster.end()
                raise
    return results


@contextlib.contextmanager
def port() -> Iterator[int]:
    """A port of loopback for the scheduler. A socket that is bound and does not listen holds it;
    the scheduler, which sets SO_REUSEADDR too, can listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def show(number: int, turn: dict[str, Any]) -> str:
    """A line of the table."""
    known = f"{max(turn['known_s'].values()):.3f}" if turn["known_s"] else "-"
    victims = " and ".join(turn["victims"])
    return (
        f"{number:>4}  {turn['shape']:<7}  {turn['mode']:<5}  {turn['way']:<6}  {victims:<22}"
        f"{known:>8}{turn['rejoined_s']:>12.3f}"
    )


def percentiles(seconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the largest."""
    ordered = sorted(seconds) or [0.0]
    at = [percentile(ordered, percent) for percent in (50, 99, 100)]
    return dict(zip(("p50", "p99", "max"), at, strict=True))


def report(results: dict[str, Any], board: Board, limits: Limits) -> bool:
    """Adds the sums to the results and prints them. False if something was not as it should be."""
    turns = results["turns"]
    known = percentiles([s for t in turns for s in t["known_s"].values()])
    rejoined = percentiles([t["rejoined_s"] for t in turns])
    results["kills"] = sum(len(t["victims"]) for t in turns)
    results["exchanges"] = sum(row.exchanges for row in board.rows)
    results["wrong"] = sum(row.wrong for row in board.rows)
    results["known"], results["rejoined"] = known, rejoined

    def times(of: dict[str, float]) -> str:
        return f"at most {of['max']:.3f} s (p50 {of['p50']:.3f}, p99 {of['p99']:.3f})"

    print(
        f"chaos: {results['kills']} kills, {len(results['hangs'])} hangs, "
        f"{results['wrong']} wrong bytes, {len(results['ended'])} other ends, "
        f"{results['exchanges']} exchanges; "
        f"known in {times(known)}, rejoined in {times(rejoined)}"
    )
    good = not (results["hangs"] or results["ended"] or results["wrong"])
    for what, of, limit in (
        ("known", known, limits.known),
        ("rejoined", rejoined, limits.rejoined),
    ):
        if of["max"] >= limit:
            print(
                f"chaos: {what} in {of['max']:.3f} s, want less than {limit:g} s", file=sys.stderr
            )
            good = False
    return good


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, help="(default: chosen, and printed)")
    parser.add_argument("--transport", default="auto", help="FSERVER_TRANSPORT (default auto)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--known",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds in which a loss must be known (default 1)",
    )
    parser.add_argument(
        "--rejoined",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds in which a successor must have joined (default 2)",
    )
    parser.add_argument(
        "--heartbeat", type=float, default=2.0, metavar="S", help="PS_HEARTBEAT_TIMEOUT (default 2)"
    )
    options = parser.parse_args(argv)
    limits = Limits(options.known, options.rejoined, options.heartbeat)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    os.environ["GOTRACEBACK"] = "all"  # for a dump
    folder = Path(tempfile.mkdtemp(prefix="fserver-chaos-"))
    board = Board(str(folder / "board"), 8 * len(MEMBERS) + options.kills)
    print(f"chaos: seed {seed}, {options.kills} kills, transport {options.transport}")
    print(
        f"{'turn':>4}  {'shape':<7}  {'mode':<5}  {'way':<6}  {'who':<22}"
        f"{'known s':>8}{'rejoined s':>12}"
    )
    began = time.monotonic()
    results = run(plan(options.kills, seed), options.transport, board, folder, limits)
    good = report(results, board, limits)
    results.update(
        seed=seed, transport=options.transport, seconds=round(time.monotonic() - began, 1)
    )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    if good:
        shutil.rmtree(folder)
    else:
        print(f"chaos: seed {seed}; what the processes said is in {folder}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
