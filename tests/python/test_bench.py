"""`fserver bench`: its arithmetic, its tables, the raw baseline, what its two processes do with
nodes that go wrong (made of a pipe), and short runs with fserver itself."""

import ctypes
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe as socket_pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest
import torch

from fserver import bench
from fserver.bench import baseline, pair, peers, pingpong, report, soak
from fserver.bench.pair import BenchError, Nodes


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


class FakeWorker(Pipe):
    def push_pull(self, push_tensors, push_keys, pull_tensors, pull_keys):
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
    def get_batch(self, timeout_ms):
        if not self.conn.poll(timeout_ms / 1e3):
            return []
        keys, data = self.conn.recv()
        self.count += 1
        return [(self.count, [received(d) for d in data], keys)]

    def respond(self, tensors, handler):
        assert handler == self.count
        self.conn.send([raw(t) for t in tensors])


class CorruptingServer(FakeServer):
    """Changes one byte of every answer."""

    def respond(self, tensors, handler):
        changed = [t.clone() for t in tensors]
        for t in changed:
            t[-1] ^= 1
        super().respond(changed, handler)


class RepeatingServer(FakeServer):
    """Goes on answering with what it answered third."""

    def respond(self, tensors, handler):
        if handler <= 3:
            self.kept = [t.clone() for t in tensors]
        super().respond(self.kept, handler)


class LeakingServer(FakeServer):
    """Keeps 64 KiB for every request: more than an allocator has lying about."""

    def respond(self, tensors, handler):
        self.kept = getattr(self, "kept", [])
        self.kept.append(bytearray(b"x" * 65536))
        super().respond(tensors, handler)


def worker(scheduler, transport):
    host, port = scheduler.split(":")
    end = time.monotonic() + 60
    while True:
        try:
            return FakeWorker(Client((host, int(port))))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)  # the server is not there yet


def server(scheduler, transport, kind=FakeServer):
    host, port = scheduler.split(":")
    with Listener((host, int(port))) as listener:
        return kind(listener.accept())


def leaking_server(scheduler, transport):
    return server(scheduler, transport, LeakingServer)


def dying_server(scheduler, transport):
    os._exit(9)


# Arithmetic and text.


def test_percentile_is_nearest_rank():
    assert report.percentile([7], 50) == 7
    assert report.percentile([7], 99) == 7
    assert report.percentile([1, 2, 3, 4], 50) == 2
    assert report.percentile([1, 2, 3], 50) == 2
    assert report.percentile(range(1, 101), 99) == 99
    assert report.percentile(range(1, 102), 99) == 100


@pytest.mark.parametrize(
    ("text", "count"),
    [("64", 64), ("4K", 4096), ("4KiB", 4096), ("1m", 1 << 20), ("64 MB", None), ("2G", 2 << 30)],
)
def test_parse_size(text, count):
    if count is None:
        with pytest.raises(ValueError, match="want a number of bytes"):
            report.parse_size(text)
    else:
        assert report.parse_size(text) == count


def test_show_size():
    shown = [report.show_size(n) for n in (0, 64, 1000, 4096, 4097, 64 << 20, 1 << 30)]
    assert shown == ["0 B", "64 B", "1000 B", "4 KiB", "4097 B", "64 MiB", "1 GiB"]


def test_row_takes_medians_over_rounds():
    measured = [{"p50_us": p, "p99_us": 2 * p} for p in (12.0, 90.0, 10.0)]
    raw_rounds = [{"p50_us": p, "p99_us": 3 * p} for p in (8.0, 7.0, 10.0)]
    row = report.row("tcp", "push_pull", 3000, 3000, 50, measured, raw_rounds)
    assert row["p50_us"] == 12 and row["p99_us"] == 24
    assert row["baseline_p50_us"] == 8 and row["baseline_p99_us"] == 24
    assert row["ratio"] == 1.5
    assert row["gbps"] == 0.5 and row["baseline_gbps"] == 0.75
    assert row["p50_us_rounds"] == [12, 90, 10] and row["rounds"] == 3 and row["iters"] == 50
    cells = report.line(row).split()
    assert cells[:2] == ["tcp", "push_pull"] and cells[-1] == "1.50"
    assert len(report.header()) == len(report.line(row))

    alone = report.row("tcp", "push", 64, 0, 50, measured, [])
    assert alone["ratio"] is None and alone["baseline_p50_us"] is None
    assert report.line(alone).split()[-1] == "-"


def test_cases():
    moved = [(c.op, c.out, c.back) for c in pingpong.cases([4096], list(pingpong.OPS))]
    assert moved == [("push", 4096, 0), ("pull", 64, 4096), ("push_pull", 4096, 4096)]
    keys = [c.key for c in pingpong.cases([64, 4096], ["push", "pull"])]
    assert len(set(keys)) == 4


def test_write_json(tmp_path):
    path = tmp_path / "out.json"
    report.write_json(str(path), report.machine((0, 1)), rows=[{"op": "push"}])
    got = json.loads(path.read_text())
    assert got["rows"] == [{"op": "push"}]
    assert got["machine"]["pinned"] == [0, 1] and got["machine"]["cores"] == os.cpu_count()
    assert got["machine"]["cpu"] and got["machine"]["torch"] and got["machine"]["kernel"]
    assert "python" in got["command"] or "pytest" in got["command"]


# Options.


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pingpong", "--sizes", "4"], "want 8 bytes or more"),
        (["pingpong", "--sizes", "many"], "want a number of bytes"),
        (["pingpong", "--ops", "push,pop"], "'pop': want one of push, pull, push_pull"),
        (["pingpong", "--rounds", "0"], "'0': want a whole number, 1 or more"),
        (["pingpong", "--cores", "0"], "want two core numbers, A,B"),
        (["pingpong", "--iters", "5", "--seconds", "1"], "not allowed with"),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_options(argv, text, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_core_that_is_not_ours(capsys):
    assert bench.main(["pingpong", "--cores", "0,4097"]) == 1
    assert "bench: --cores: core 4097: want one of " in capsys.readouterr().err


def test_one_core_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert pair.choose_cores(None) == (5, 5)
    assert "both processes share core 5" in capsys.readouterr().err


def test_ranges():
    assert pair._ranges([0]) == "0"
    assert pair._ranges([0, 1, 2, 5, 8, 9]) == "0-2,5,8-9"


# The raw baseline.

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"
)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@needs_compiler
def test_baseline():
    with baseline.Baseline(None) as raw_echo:
        figures = raw_echo.measure(4096, 64, 10, 200, 60)
        assert figures["iters"] == 200
        assert 0 < figures["min_us"] <= figures["p50_us"] <= figures["p99_us"]
        assert figures["min_us"] <= figures["mean_us"]
        assert raw_echo.measure(1, 1 << 20, 0, 1, 60)["iters"] == 1

        # Between rounds it leaves the cores alone.
        both = [raw_echo._process.pid, *children(raw_echo._process.pid)]
        assert len(both) == 2
        before = sum(map(cpu_ticks, both))
        time.sleep(0.3)
        assert sum(map(cpu_ticks, both)) - before <= 1

        with pytest.raises(BenchError, match="ended with status 1: rawecho: want OUT BACK"):
            raw_echo.measure(0, 0, 0, 1, 60)


@needs_compiler
def test_baseline_ends_with_its_input():
    done = subprocess.run(
        [baseline.compiled(), "-1", "-1"],
        input="64 64 0 5\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["iters"] == 5 and not done.stderr


def test_baseline_says_what_is_missing(monkeypatch, tmp_path):
    source = tmp_path / "tools" / "rawecho.c"
    monkeypatch.setattr(baseline, "ROOT", tmp_path)
    monkeypatch.setattr(baseline, "SOURCE", source)
    with pytest.raises(BenchError, match="needs the source tree.*--no-baseline"):
        baseline.compiled()
    source.parent.mkdir()
    source.write_text("int main(void) { return undeclared; }\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BenchError, match="no-such-compiler: not found.*apt-get install gcc"):
        baseline.compiled()
    if shutil.which("cc"):
        monkeypatch.setenv("CC", "cc")
        with pytest.raises(BenchError, match="undeclared"):
            baseline.compiled()
        assert [p.name for p in (tmp_path / "build").iterdir()] == []


# What the two do, here in two threads of this process.


def play(kind, op, *calls):
    """Makes the calls at both peers at once; the worker's error, if any, is raised."""
    ours, theirs = socket_pipe()
    case = pair.Case(op, 0, 64, 0 if op == "push" else 64)
    two = peers.WorkerPeer(FakeWorker(ours)), peers.ServerPeer(kind(theirs))
    with ThreadPoolExecutor(2) as pool:
        for method, *args in [("prepare", case), *calls]:
            jobs = [pool.submit(getattr(peer, method), *args) for peer in two]
            result = jobs[0].result()
            jobs[1].result()
    return result


@pytest.mark.parametrize("op", pingpong.OPS)
def test_peers_move_and_measure(op):
    figures = play(FakeServer, op, ("verify", 1), ("run", 10), ("measure", 2, 50), ("verify", 2))
    assert figures is None
    figures = play(FakeServer, op, ("measure", 2, 50))
    assert 0 < figures["min_us"] <= figures["p50_us"] <= figures["p99_us"]


def test_peers_see_one_wrong_byte():
    text = r"the answer: byte 63 of 64 is \d+, not \d+ \(exchange 1\)"
    for op in ("pull", "push_pull"):
        with pytest.raises(AssertionError, match=text):
            play(CorruptingServer, op, ("verify", 1))


def test_peers_see_old_data():
    for op in ("pull", "push_pull"):
        with pytest.raises(AssertionError, match="exchange 4 brought the answer to 3"):
            play(RepeatingServer, op, ("run", 3), ("run", 1))


def test_pattern_is_everywhere_and_changes():
    pattern = peers.Pattern()
    t = torch.zeros(3 * peers.PERIOD + 11, dtype=torch.uint8)
    pattern.fill(t, 1)
    other = t.clone()
    pattern.fill(other, 2)
    assert bool((t != other).all())
    peers.number(t).value = 7
    pattern.check(t, 1, 7, "t")
    t[2 * peers.PERIOD + 5] += 1
    with pytest.raises(AssertionError, match=f"byte {2 * peers.PERIOD + 5} of {len(t)}"):
        pattern.check(t, 1, 7, "t")


# The two processes.


@needs_compiler
def test_pingpong(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64,4K", "--rounds", "2", "--iters", "20", "--json", str(path)]
    affinity = os.sched_getaffinity(0)
    assert bench.main(["pingpong", *argv]) == 0
    assert os.sched_getaffinity(0) == affinity
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["transport", "op"] and len(lines) == 2 + 6
    rows = json.loads(path.read_text())["rows"]
    assert [(r["op"], r["bytes_out"], r["bytes_back"]) for r in rows] == [
        ("push", 64, 0),
        ("pull", 64, 64),
        ("push_pull", 64, 64),
        ("push", 4096, 0),
        ("pull", 64, 4096),
        ("push_pull", 4096, 4096),
    ]
    for row in rows:
        assert row["transport"] == "tcp" and row["iters"] == 20 and row["rounds"] == 2
        assert 0 < row["p50_us"] <= row["p99_us"] and 0 < row["baseline_p50_us"]
        assert row["ratio"] == pytest.approx(row["p50_us"] / row["baseline_p50_us"], abs=0.001)
        assert len(row["p50_us_rounds"]) == len(row["baseline_p50_us_rounds"]) == 2


def test_pair_reports_a_peer_that_died():
    with pytest.raises(BenchError, match="the server ended with status 9"):
        pingpong.main(["--sizes", "64", "--no-baseline"], Nodes(worker, dying_server))


def test_soak(tmp_path, capsys):
    path = tmp_path / "soak.json"
    argv = ["--count", "300", "--warmup", "300", "--size", "64", "--json", str(path)]
    assert soak.main([*argv, "--limit", "1000000"], Nodes(worker, leaking_server)) == 1
    out, err = capsys.readouterr()
    assert "300 push_pulls of 64 B each way" in out and "growth" in out
    assert "more than 1000000" in err
    rows = json.loads(path.read_text())["rows"]
    assert [r["role"] for r in rows] == ["worker", "server"]
    for row in rows:
        sizes = row["resident_bytes"]
        assert len(sizes) == 1 + soak.PARTS and row["growth_bytes"] == sizes[-1] - sizes[0]
    assert rows[0]["growth_bytes"] < 1_000_000 < 300 * 65536 // 2 <= rows[1]["growth_bytes"]


def test_idle(tmp_path, capsys):
    path = tmp_path / "idle.json"
    assert bench.main(["idle", "--seconds", "0.5", "--json", str(path)]) == 0
    assert "blocked in get_batch" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(0 <= r["cpu_percent"] < 60 for r in rows)


def test_port_is_held():
    with pair._port() as address:
        port = int(address.rpartition(":")[2])
        with Listener(("127.0.0.1", port)) as listener:
            assert listener.address[1] == port
