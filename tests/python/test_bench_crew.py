"""The processes of a benchmark: what they do with nodes that go wrong, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe as socket_pipe
from multiprocessing import forkserver
from multiprocessing.connection import Listener
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bench_fakes import CorruptingServer, FakeServer, FakeWorker, RepeatingServer, interruptible

from fserver import bench, run
from fserver.bench import actors, crew, options, processes
from fserver.bench.crew import Case, Place
from fserver.bench.errors import BenchError, WrongDataError


def play(kind, op, *calls):
    """Makes the calls at both peers at once; the worker's error, if any, is raised."""
    ours, theirs = socket_pipe()
    case = Case(op, (64,), () if op == "push" else (64,))
    two = (
        actors.WorkerActor(lambda place: FakeWorker(ours)),
        actors.ServerActor(lambda place: kind(theirs)),
    )
    for actor, role in zip(two, ("worker", "server"), strict=True):
        actor.connect([Place(role, 0, 1, 1, "", {})])
    with ThreadPoolExecutor(2) as pool:
        for method, *args in [("prepare", case), *calls]:
            jobs = [pool.submit(getattr(peer, method), *args) for peer in two]
            result = jobs[0].result()
            jobs[1].result()
    return result


@pytest.mark.parametrize("op", options.OPS)
def test_parts_move_and_measure(op):
    figures = play(FakeServer, op, ("verify", 1), ("run", 10), ("measure", 2, 50), ("verify", 2))
    assert figures is None
    figures = play(FakeServer, op, ("measure", 2, 50))
    assert 0 < figures["min_us"] <= figures["p50_us"] <= figures["p99_us"]


def test_parts_see_one_wrong_byte():
    text = r"answer 0 of server 0 to worker 0: byte 63 of 64 is \d+, not \d+ \(exchange 1\)"
    for op in ("pull", "push_pull"):
        with pytest.raises(WrongDataError, match=text):
            play(CorruptingServer, op, ("verify", 1))


def test_parts_see_old_data():
    for op in ("pull", "push_pull"):
        with pytest.raises(WrongDataError, match="exchange 4 brought the data of 3"):
            play(RepeatingServer, op, ("run", 3), ("run", 1))


def test_pattern_is_everywhere_and_changes():
    pattern = actors.Pattern()
    t = torch.zeros(3 * actors.PERIOD + 11, dtype=torch.uint8)
    pattern.fill(t, 1)
    other = t.clone()
    pattern.fill(other, 2)
    assert bool((t != other).all())
    actors.number(t).value = 7
    pattern.check(t, 1, 7, "t")
    t[2 * actors.PERIOD + 5] += 1
    with pytest.raises(WrongDataError, match=f"byte {2 * actors.PERIOD + 5} of {len(t)}"):
        pattern.check(t, 1, 7, "t")


def test_a_fork_server_that_is_killed(fork_server, monkeypatch, capsys):
    """While it is to start a process, of which it has been told."""
    read = forkserver.read_signed

    def killing(fd):
        os.kill(fork_server._forkserver_pid, signal.SIGKILL)
        return read(fd)

    fork_server.ensure_running()
    os.kill(fork_server._forkserver_pid, signal.SIGSTOP)
    monkeypatch.setattr(forkserver, "read_signed", killing)
    assert bench.main(["pingpong", "--sizes", "64", "--no-baseline"]) == 1
    text = "bench: the worker cannot be started: EOFError("
    assert text in capsys.readouterr().err


def variable(conn, name):
    conn.send(os.environ.get(name))
    conn.recv()


def test_a_process_can_have_variables_of_its_own():
    """It alone; it is no fork."""
    first, second = (processes.Child("one", variable, "OWN", **own) for own in ({"OWN": "1"}, {}))
    assert processes.gather([first, second], crew.START_TIMEOUT, 0) == ["1", None]
    for child in (first, second):
        child.close()
    assert "OWN" not in os.environ


def test_the_end_of_a_process_is_an_answer():
    for end, why in (
        (lambda child: child.process.kill(), "^the one ended with status -9$"),
        (lambda child: child.put(""), "^the one ended with status 0$"),
        (lambda child: child.conn.send_bytes(b""), r"(?s)^the one failed: \nTraceback .*EOFError"),
    ):
        child = processes.Child("one", variable, "OWN")
        assert child.get(crew.START_TIMEOUT) is None
        end(child)
        with pytest.raises(BenchError, match=why):
            child.get(60)
        child.put("")
        child.close()


def said(*messages):
    """A crew of a peer for each message, which has been received from it."""
    both = crew.Crew([])
    for message in messages:
        ours, theirs = socket_pipe()
        theirs.send(message)
        both.peers.append(Mock(conn=ours))
    return both


def test_wrong_data_comes_before_other_failures():
    lost = BenchError("the worker 0 failed: worker 1 is gone", "worker 1 is gone")
    wrong = WrongDataError("the worker 1 received wrong data: byte 3")
    assert said(1, 2).results(5) == [1, 2]
    with pytest.raises(WrongDataError, match="^the worker 1 received wrong data: byte 3\n"):
        said(lost, wrong).results(5)
    with pytest.raises(BenchError, match="(?s)the worker 0 failed: .*the worker 0 failed: "):
        said(lost, lost).results(5)
    with pytest.raises(BenchError, match="the worker 0 failed: worker 1 is gone$") as caught:
        said(lost, 1).results(5)
    assert caught.value.reason == "worker 1 is gone"


GONE = (
    "EOFError",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "TimeoutError: the other side does not answer",
)


@pytest.mark.parametrize("gone", GONE)
def test_the_cause_comes_before_the_loss_of_another_process(gone):
    """Whichever is told first. The reason is one line of the cause."""
    lost = BenchError(f"the worker 0 failed: \nTraceback\n{gone}", gone)
    for cause, reason in (
        (BenchError("the worker 1 failed: \nValueError: no\nMight be late", "ValueError: no\nM"),
         "ValueError: no"),
        (BenchError("the worker 1 ended with status -11"), "the worker 1 ended with status -11"),
    ):  # fmt: skip
        for told in ((lost, cause), (cause, lost)):
            with pytest.raises(BenchError) as caught:
                said(*told).results(5)
            assert caught.value.reason == reason
            assert str(caught.value).startswith(str(cause)) and gone in str(caught.value)


class Sleeper(actors.Actor):
    def sleep(self, seconds):
        time.sleep(seconds)


def test_a_process_that_hangs_is_named_and_ended(fork_server, capfd):
    """Within the limit, and it prints where it is."""
    both = crew.members(None, worker=Sleeper, server=actors.ServerActor)
    with crew.Crew([both[0]], limit=1) as one:
        process = one.peers[0].process
        begun = time.monotonic()
        with pytest.raises(BenchError, match="^no answer from worker within 1 s$"):
            one.all("sleep", 1000)
        assert time.monotonic() - begun < 20 and not process.is_alive()
    assert " in sleep\n" in capfd.readouterr().err


def test_an_interrupt_ends_all_children():
    """Ctrl-C goes to all processes of the terminal."""
    command = [sys.executable, "-m", "fserver", "bench", "pingpong", "--sizes", "64"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"start_new_session": True, "preexec_fn": interruptible}
    parent = subprocess.Popen([*command, "--seconds", "100", "--no-baseline"], **how)
    try:
        assert parent.stdout.readline() and parent.stdout.readline()  # machine and header
        end = time.monotonic() + 60
        while len(children := of_group(parent.pid)) < 4:  # itself, two servers of forks, a pair
            assert time.monotonic() < end, children
            time.sleep(0.1)
        time.sleep(3)
        os.killpg(parent.pid, signal.SIGINT)
        parent.communicate(timeout=30)
        assert parent.returncode
        while of_group(parent.pid):
            assert time.monotonic() < end, of_group(parent.pid)
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def of_group(group):
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat] if int(its) == group and state != "Z" else []
    return found


STAYS = """
import multiprocessing, os, signal
from fserver.bench import crew, processes

def stay(conn):
    os.closerange(1, 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    conn.send(None)
    signal.pause()

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda kind: fork
processes.KILL_TIMEOUT = 2
both = crew.Crew([])
both.peers = [processes.Child(name, stay) for name in ("worker", "server")]
processes.gather(both.peers, 60, 0)
for child in both.peers:
    print(child.process.pid)
child.process.kill = lambda: None  # the server, which the kernel does not let go
both.close(0)
"""


def test_a_process_that_cannot_be_killed():
    """It is told, the others are ended, and this one does not wait for it when it leaves."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STAYS],
        env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = parent.communicate(timeout=60)
        killed, stayed = out.splitlines()
        assert not os.path.exists(f"/proc/{killed}")
        os.kill(int(stayed), 0)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
    text = f"the server (pid {stayed}) has not ended 2 s after SIGKILL: the kernel holds it"
    assert err.startswith(f"bench: {text}") and f"/proc/{stayed}/stack" in err
    assert parent.returncode == 1


def test_port_is_held():
    with run.free_port("127.0.0.1") as address:
        port = int(address.rpartition(":")[2])
        with Listener(("127.0.0.1", port)) as listener:
            assert listener.address[1] == port


def test_a_process_that_cannot_be_started_ends_the_others(monkeypatch):
    made, real = [], crew.Child

    def start(*args):
        if made:
            raise BenchError("no more processes")
        made.append(real(*args))
        return made[0]

    monkeypatch.setattr(crew, "Child", start)
    with pytest.raises(BenchError, match="no more processes"):
        crew.Crew(crew.members(None))
    assert not made[0].process.is_alive()
