"""`fserver bench`: its arithmetic, its tables, the raw baseline, what its two processes do with
nodes that go wrong (made of a pipe), and short runs with fserver itself."""

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import Pipe as socket_pipe
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest
import torch

from fserver import Link, Scheduler, bench
from fserver.bench import (
    af,
    baseline,
    crew,
    fanin,
    ipc,
    matrix,
    options,
    peers,
    pingpong,
    plot,
    randoms,
    report,
    soak,
    stamps,
    threads,
    turns,
    verify,
)
from fserver.bench.crew import Case, Nodes, Place, real_node
from fserver.bench.errors import BenchError, GaveUpError, WrongDataError


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
    measured = [{"iters": 50, "p50_us": p, "p99_us": 2 * p} for p in (12.0, 90.0, 10.0)]
    raw_rounds = [{"p50_us": p, "p99_us": 3 * p} for p in (8.0, 7.0, 10.0)]
    row = report.row("tcp", "push_pull", 3000, 3000, measured, raw_rounds, "raw tcp", servers=2)
    assert row["p50_us"] == 12 and row["p99_us"] == 24
    assert row["baseline_p50_us"] == 8 and row["baseline_p99_us"] == 24
    assert row["ratio"] == 1.5
    assert row["gbps"] == 0.5 and row["baseline_gbps"] == 0.75
    assert row["p50_us_rounds"] == [12, 90, 10] and row["rounds"] == 3 and row["iters"] == 50
    assert row["baseline"] == "raw tcp" and row["servers"] == 2
    table = report.Table()
    cells = table.line(row).split()
    assert cells[:2] == ["tcp", "push_pull"] and cells[-1] == "1.50"
    assert len(table.header()) == len(table.line(row))

    alone = report.row("tcp", "push", 64, 0, measured, [], "raw tcp", "no compiler")
    assert alone["ratio"] is None and alone["baseline_p50_us"] is None
    assert alone["baseline"] is None and alone["baseline_missing"] == "no compiler"
    assert table.line(alone).split()[-1] == "-"

    skipped = report.skipped("cma", "push", 64, 0, "no such thing", place="local")
    assert skipped["p50_us"] is None and skipped["place"] == "local"
    assert skipped.keys() == alone.keys() | {"place"}
    assert table.line(skipped).endswith("skipped: no such thing")


def test_cases():
    moved = [(c.op, c.out, c.back) for c in pingpong.cases([(4096, 8192)], list(pingpong.OPS))]
    assert moved == [
        ("push", (4096,), ()),
        ("pull", (64,), (8192,)),
        ("push_pull", (4096,), (8192,)),
    ]
    answered = [pingpong._moved(c) for c in pingpong.cases([(4096, 8192)], list(pingpong.OPS))]
    assert answered == [(4096, 64), (64, 8192), (4096, 8192)]
    assert options.exchanges("64,4K:8K") == [(64, 64), (4096, 8192)]
    keys = [c.key for c in pingpong.cases([(64, 64), (4096, 4096)], ["push", "pull"])]
    assert len(set(keys)) == 4
    several = pingpong.cases([(64, 32), (8, 8)], ["push", "push_pull"], tensors=3)
    assert several[1].out == (64,) * 3 and several[1].back == (32,) * 3
    assert [c.key for c in several] == [0, 3, 6, 9]


def test_json(tmp_path):
    path = tmp_path / "out.json"
    asked = Namespace(json=str(path), plot=None)
    report.finish(asked, "pingpong", report.machine((0, 1)), [{"op": "push"}], more=3)
    got = json.loads(path.read_text())
    assert got["bench"] == "pingpong" and got["rows"] == [{"op": "push"}] and got["more"] == 3
    assert got["machine"]["pinned"] == [0, 1] and got["machine"]["cores"] == os.cpu_count()
    assert got["machine"]["cpu"] and got["machine"]["torch"] and got["machine"]["kernel"]
    assert got["command"].split()[0] == "fserver"


def test_says_which_build(tmp_path, monkeypatch):
    """The commit of a source tree, or of the bundle it has come in; of neither the version."""
    monkeypatch.setattr(report, "__file__", str(tmp_path / "fserver/bench/report.py"))
    version = report._own()
    (tmp_path / "build").mkdir()
    (tmp_path / "build/commit").write_text("12ab34c\n")
    assert report._own() == f"{version} (12ab34c)"
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert report._own() == version  # nothing is committed
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert report._own() == f"{version} ({commit.stdout.strip()})"


def test_progress_needs_no_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with report.Progress(3, "test") as bar:
        bar.step()
        bar.print("a row")
    assert capsys.readouterr().out == "a row\n"


def test_parts_add_up():
    stamped = [100, 130, 9000, 9007, 9057, 9060, 600, 611]
    parts = stamps.parts(stamped)
    assert parts["network"] == (600 - 130) - (9060 - 9000)
    assert sum(parts.values()) == 611 - 100 and parts.keys() == stamps.PARTS.keys()
    assert stamps.medians([stamped])["serve"] == 0.05


def test_fit():
    line = fanin.fit([(n, 10 + 5.0 * n) for n in (1, 2, 4, 8, 40)])
    assert line["fixed_us"] == 10 and line["per_group_us"] == 5 and line["r2"] == 1
    assert line["exponent"] < 1
    assert fanin.fit([(n, 3.0 * n**2) for n in (1, 2, 4, 8)])["exponent"] == 2


class Recorder:
    """A player that says when it is its turn; one exchange takes it `us`."""

    def __init__(self, name, turns, us, unit=1):
        self.name, self.turns, self.us, self.unit = name, turns, us, unit

    def check(self, seed):
        self.turns.append((self.name, "check", seed))

    def measure(self, warmup, count):
        self.turns.append((self.name, "measure", count))
        return {"iters": count, "p50_us": self.us, "p99_us": self.us}


def test_players_take_turns():
    seen = []
    a, b = Recorder("a", seen, 10.0), Recorder("b", seen, 100.0)
    results = turns.take_turns([a, b], rounds=2, seconds=0.01)
    assert [[r["iters"] for r in rounds] for rounds in results] == [[1000, 1000], [100, 100]]
    trials = [("a", "check", 0), ("a", "measure", 10), ("b", "check", 0), ("b", "measure", 10)]
    one = [("a", "measure", 1000), ("a", "check", 1), ("b", "measure", 100), ("b", "check", 1)]
    two = [(name, what, 2 if what == "check" else n) for name, what, n in one]
    assert seen == trials + one + two


class Quitter(Recorder):
    """Gives up at its second turn."""

    def check(self, seed):
        super().check(seed)
        if seed == 2:
            raise GaveUpError("no more")


def test_who_gives_up_has_no_figures_and_the_others_go_on():
    seen = []
    players = [Recorder("a", seen, 10.0), Quitter("b", seen, 10.0), Recorder("c", seen, 10.0)]
    results = turns.take_turns(players, rounds=3, seconds=1, iters=10)
    assert [len(rounds) for rounds in results] == [3, 0, 3]
    assert [turn for turn in seen if turn[0] == "b"][-1] == ("b", "check", 2)


def test_units_are_counted():
    raw, layers = Recorder("raw", [], 10.0), Recorder("layers", [], 10.0, unit=50)
    results = turns.take_turns([raw, layers], rounds=1, seconds=0.01)
    assert [rounds[0]["iters"] for rounds in results] == [1000, 20]
    results = turns.take_turns([raw, layers], rounds=1, seconds=0.01, iters=3)
    assert [rounds[0]["iters"] for rounds in results] == [150, 3]


# Options.


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pingpong", "--sizes", "4"], "want 8 bytes or more"),
        (["pingpong", "--sizes", "many"], "want a number of bytes"),
        (["pingpong", "--sizes", "64:4"], "want 8 bytes or more"),
        (["matrix", "--sizes", "64:"], "want a number of bytes"),
        (["pingpong", "--ops", "push,pop"], "'pop': want one of push, pull, push_pull"),
        (["pingpong", "--rounds", "0"], "'0': want a whole number, 1 or more"),
        (["pingpong", "--cores", "0"], "want two core numbers, A,B"),
        (["pingpong", "--seconds", "0"], "'0': want seconds, more than 0"),
        (["matrix", "--places", "here"], "'here': want one of local, remote, joint"),
        (["matrix", "--role", "server"], "--scheduler and --role: give both, or neither"),
        (["af", "--in-flight", "4"], "want at most --stages 3"),
        (["af", "--layers", "2000"], "want at most 4096"),
        (["fanin", "--groups", "0"], "'0': want a whole number, 1 or more"),
        (["verify", "--seconds", "0"], "want seconds, more than 0"),
        (
            ["pingpong", "--beside", "mpi"],
            "'mpi': want one of nccl, symm, nvshmem, nixl, gloo, none",
        ),
        (["matrix", "--beside", "gloo,mpi"], "'mpi': want one of nccl"),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_options(argv, text, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_files_that_cannot_be_written(name, tmp_path, monkeypatch, capsys):
    """Before anything is done."""
    argv = [name, *(["af", "--dry"] if name == "graph" else [])]

    def refused(option, path):
        with pytest.raises(SystemExit) as end:
            bench.main([*argv, option, str(path)])
        out, err = capsys.readouterr()
        assert end.value.code == 2 and not out
        return err.partition(f"error: argument {option}: {str(path)!r}: ")[2].strip()

    lost = tmp_path / "no" / "where.json"
    told = f"the folder {str(lost.parent)!r} does not exist: create it, or give another file"
    for option in ("--json", "--plot") if name != "graph" else ("--json",):
        assert refused(option, lost) == told
        assert refused(option, tmp_path) == "want the name of a file"
        assert refused(option, "") == "want the name of a file"
    (tmp_path / "old.json").write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: path not in map(str, closed))
    told = "not writable: change its permissions, or give another file"
    closed = [tmp_path / "old.json"]
    assert refused("--json", tmp_path / "old.json") == told
    closed = [tmp_path]
    assert refused("--json", tmp_path / "new.json") == told
    assert options.output(str(tmp_path / "old.json")) == str(tmp_path / "old.json")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("old.json", "kept")]


def test_a_disk_that_is_full(capsys):
    assert bench.main(["idle", "--seconds", "0.1", "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err.endswith(
        "bench: --json /dev/full: No space left on device: free some space, or give another file\n"
    )


def test_core_that_is_not_ours(capsys):
    assert bench.main(["pingpong", "--cores", "0,4097"]) == 1
    assert "bench: --cores: core 4097: want one of " in capsys.readouterr().err


def test_one_core_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert options.choose_cores(None) == (5, 5)
    assert "both processes share core 5" in capsys.readouterr().err


def test_ranges():
    assert options._ranges([0]) == "0"
    assert options._ranges([0, 1, 2, 5, 8, 9]) == "0-2,5,8-9"


# The raw baseline.

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"
)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.fixture
def way(request, tmp_path, monkeypatch):
    """A raw baseline, and where it is; that of GPUs over a driver that has none."""
    if request.param != "raw gpu":
        return request.param, None
    source = Path(__file__).with_name("fakecuda.c")
    command = [os.environ.get("CC", "cc"), "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return request.param, "0,1"


@needs_compiler
@pytest.mark.parametrize("way", baseline.WAYS, indirect=True)
def test_baseline(way):
    with baseline.Baseline(way[0], None, way[1]) as raw_echo:
        raw_echo.prepare(4096, 64)
        figures = raw_echo.measure(10, 200)
        assert figures["iters"] == 200
        assert 0 < figures["min_us"] <= figures["p50_us"] <= figures["p99_us"]
        assert figures["min_us"] <= figures["mean_us"]
        raw_echo.prepare(1, 1 << 20)
        assert raw_echo.measure(0, 1)["iters"] == 1

        # Between rounds it leaves the cores alone.
        both = [raw_echo._process.pid, *children(raw_echo._process.pid)]
        assert len(both) == 2
        before = sum(map(cpu_ticks, both))
        time.sleep(0.3)
        assert sum(map(cpu_ticks, both)) - before <= 1

        raw_echo.prepare(0, 0)
        with pytest.raises(BenchError, match="ended with status 1: raw[a-z]+: want OUT BACK"):
            raw_echo.measure(0, 1)


@needs_compiler
@pytest.mark.parametrize("way", ["raw gpu"], indirect=True)
def test_baseline_between_gpus_says_what_is_wrong(way, monkeypatch):
    with baseline.Baseline(way[0], None, "0,2") as raw_echo:
        raw_echo.prepare(64, 64)
        with pytest.raises(BenchError, match="rawgpu: there is no GPU 2"):
            raw_echo.measure(0, 1)
    monkeypatch.setenv("FAKECUDA_LOSE", "1")
    with baseline.Baseline(way[0], None, way[1]) as raw_echo:
        raw_echo.prepare(64, 64)
        with pytest.raises(BenchError, match="rawgpu: iteration 6: got the data of 0"):
            raw_echo.measure(0, 5)


@pytest.mark.parametrize("name", ["pingpong", "soak"])
def test_gpus_that_are_not_there(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([name, "--device", "gpu"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err == "bench: --device gpu: torch sees no GPU (run `fserver doctor` for the reason)\n"


@needs_compiler
@pytest.mark.parametrize("way", baseline.WAYS, indirect=True)
def test_baseline_ends_when_its_server_dies(way):
    with baseline.Baseline(way[0], None, way[1]) as raw_echo:
        raw_echo.prepare(64, 64)
        raw_echo.measure(0, 5)
        (server_pid,) = children(raw_echo._process.pid)
        os.kill(server_pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="ended with status 1"):
            raw_echo.measure(0, 1 << 20)


@pytest.fixture
def far_server():
    server = baseline.FarServer("127.0.0.1", "the right token")
    yield server
    server.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10)


@needs_compiler
def test_far_baseline_takes_only_who_has_the_token(far_server):
    port = far_server.port
    with ThreadPoolExecutor(1) as pool, connected(port) as silent, connected(port) as short:
        accepted = pool.submit(far_server.accept)
        short.sendall(b"the right")
        assert short.recv(1) == b"" and silent.recv(1) == b""
        with pytest.raises(BenchError, match="port .* of 127.0.0.1.*--no-baseline"):
            baseline.FarBaseline(None, "127.0.0.1", port, "the wrong token")
        with baseline.FarBaseline(None, "127.0.0.1", port, "the right token") as raw_echo:
            assert accepted.result(10)
            for out, back in ((64, 64), (4096, 1)):
                raw_echo.prepare(out, back)
                figures = raw_echo.measure(2, 20)
                assert figures["iters"] == 20 and figures["p50_us"] > 0
            with pytest.raises(ConnectionRefusedError):
                connected(port)
        # As its client left. The kernel kills it with the thread of the pool that started it.
        assert far_server._process.wait(30) == 0


@needs_compiler
def test_far_baseline_ends_when_its_server_dies(far_server):
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(far_server.accept)
        with baseline.FarBaseline(
            None, "127.0.0.1", far_server.port, "the right token"
        ) as raw_echo:
            assert accepted.result(10)
            raw_echo.prepare(64, 64)
            raw_echo.measure(0, 5)
            far_server._process.kill()
            with pytest.raises(BenchError, match="ended with status 1: rawecho: .*--no-baseline"):
                raw_echo.measure(0, 1 << 20)


@needs_compiler
def test_far_baseline_without_the_other(monkeypatch, far_server):
    monkeypatch.setattr(baseline, "CONNECT", 0.1)
    port = far_server.port
    with pytest.raises(BenchError, match=f"port {port} of 127.0.0.1: .*--no-baseline"):
        baseline.FarBaseline(None, "127.0.0.1", port, "the right token")  # nobody answers
    assert not baseline.FarServer("127.0.0.1", "the right token").accept()
    far_server.close()
    with pytest.raises(BenchError, match="Connection refused .*--no-baseline"):
        baseline.FarBaseline(None, "127.0.0.1", port, "the right token")
    with pytest.raises(BenchError, match="listen on 192.0.2.1: "):
        baseline.FarServer("192.0.2.1", "the right token")


@needs_compiler
def test_baseline_ends_with_its_input():
    done = subprocess.run(
        [baseline.compiled("rawcma.c"), "-1", "-1", "shm"],
        input="64 64 0 5\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["iters"] == 5 and not done.stderr


def test_baseline_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(baseline, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "raw.h").write_text("")
    (tmp_path / "rawecho.c").write_text("int main(void) { return undeclared; }\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BenchError, match="no-such-compiler: not found.*apt-get install gcc"):
        baseline.compiled("rawecho.c")
    asked = Namespace(no_baseline=None)
    with ExitStack() as stack:
        raw_echo, says = options.open_baseline(stack, asked, "raw tcp", None)
    assert raw_echo is None and "no-such-compiler" in says["missing"]
    assert "there is no baseline: no-such-compiler" in capsys.readouterr().err
    if shutil.which("cc"):
        monkeypatch.setenv("CC", "cc")
        with pytest.raises(BenchError, match="undeclared"):
            baseline.compiled("rawecho.c")
    cache = tmp_path / "cache" / "fserver"
    assert list(cache.iterdir()) == []
    if shutil.which("cc"):
        (tmp_path / "rawecho.c").write_text("int main(void) { return 3; }\n")
        with ExitStack() as stack:
            raw_echo, says = options.open_baseline(stack, asked, "raw tcp", None)
        assert raw_echo is None and says["missing"].startswith(
            "the baseline raw tcp ended with status 3"
        )
    cache.chmod(0o777)
    with pytest.raises(BenchError, match="others may write to it"):
        baseline.compiled("rawecho.c")


@needs_compiler
def test_baseline_is_compiled_once_for_each_version(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = baseline.compiled("rawecho.c")
    written = first.stat().st_mtime_ns
    assert baseline.compiled("rawecho.c") == first and first.stat().st_mtime_ns == written
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in ("raw.h", "rawecho.c"):
        shutil.copy(baseline.SOURCES / source, sources)
    with (sources / "raw.h").open("a") as out:
        out.write("/* newer */\n")
    monkeypatch.setattr(baseline, "SOURCES", sources)
    assert baseline.compiled("rawecho.c") != first


# What the two do, here in two threads of this process.


def play(kind, op, *calls):
    """Makes the calls at both peers at once; the worker's error, if any, is raised."""
    ours, theirs = socket_pipe()
    case = Case(op, (64,), () if op == "push" else (64,))
    two = (
        peers.WorkerPart(lambda place: FakeWorker(ours)),
        peers.ServerPart(lambda place: kind(theirs)),
    )
    for part, role in zip(two, ("worker", "server"), strict=True):
        part.connect([Place(role, 0, 1, 1, "", {})])
    with ThreadPoolExecutor(2) as pool:
        for method, *args in [("prepare", case), *calls]:
            jobs = [pool.submit(getattr(peer, method), *args) for peer in two]
            result = jobs[0].result()
            jobs[1].result()
    return result


@pytest.mark.parametrize("op", pingpong.OPS)
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
        with pytest.raises(WrongDataError, match="exchange 4 brought the answer to 3"):
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
    with pytest.raises(WrongDataError, match=f"byte {2 * peers.PERIOD + 5} of {len(t)}"):
        pattern.check(t, 1, 7, "t")


# The processes.


def written(path: Path, name: str) -> list[dict]:
    """The rows of a file, after a look at the rest."""
    got = json.loads(path.read_text())
    assert got["bench"] == name and got["machine"]["cpu"] and got["command"]
    return got["rows"]


@needs_compiler
def test_pingpong(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64,4K,64:4K", "--rounds", "2", "--iters", "20", "--json", str(path)]
    affinity = os.sched_getaffinity(0)
    assert bench.main(["pingpong", "--transport", "tcp,auto", *argv]) == 0
    assert os.sched_getaffinity(0) == affinity
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["transport", "op"] and len(lines) == 2 + 18
    rows = written(path, "pingpong")
    assert [(r["op"], r["bytes_out"], r["bytes_back"]) for r in rows] == 2 * [
        ("push", 64, 0),
        ("pull", 64, 64),
        ("push_pull", 64, 64),
        ("push", 4096, 0),
        ("pull", 64, 4096),
        ("push_pull", 4096, 4096),
        ("push", 64, 0),
        ("pull", 64, 4096),
        ("push_pull", 64, 4096),
    ]
    for transport, row in zip(["tcp"] * 9 + ["cma"] * 9, rows, strict=True):
        assert (
            row["transport"] == transport
            and row["baseline"] == f"raw {transport}"
            and row["iters"] == 20
            and row["rounds"] == 2
        )
        assert 0 < row["p50_us"] <= row["p99_us"] and 0 < row["baseline_p50_us"]
        assert row["ratio"] == pytest.approx(row["p50_us"] / row["baseline_p50_us"], abs=0.001)
        assert len(row["p50_us_rounds"]) == len(row["baseline_p50_us_rounds"]) == 2


def test_pair_reports_a_peer_that_died():
    with pytest.raises(BenchError, match="the server ended with status 9"):
        pingpong.main(["--sizes", "64", "--no-baseline"], Nodes(worker, dying_server))


def test_a_fork_server_that_is_killed(monkeypatch, capsys):
    """While it is to start a process, of which it has been told."""
    read = forkserver.read_signed

    def killing(fd):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        return read(fd)

    forkserver.ensure_running()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    monkeypatch.setattr(forkserver, "read_signed", killing)
    assert bench.main(["pingpong", "--sizes", "64", "--no-baseline"]) == 1
    text = "bench: the worker cannot be started: the fork server of multiprocessing has ended ("
    assert text in capsys.readouterr().err


def said(*messages):
    """A peer of each message that has been received from it."""
    made = []
    for i, message in enumerate(messages):
        ours, theirs = socket_pipe()
        theirs.send(message)
        made.append(crew.Peer(crew.Member(f"worker {i}", "", "worker"), ours))
    return crew.Crew(made)


def test_wrong_data_comes_before_other_failures():
    lost, wrong = ("failed", ("worker 1 is gone", "worker 1 is gone")), ("wrong", "byte 3")
    assert said(("ok", 1), ("ok", 2)).results() == [1, 2]
    with pytest.raises(WrongDataError, match="the worker 1 received wrong data: byte 3"):
        said(lost, wrong).results()
    with pytest.raises(BenchError, match="(?s)the worker 0 failed: .*the worker 1 failed: "):
        said(lost, lost).results()
    with pytest.raises(BenchError, match="the worker 0 failed: worker 1 is gone$"):
        said(lost, ("ok", 1)).results()


STAYS = """
import multiprocessing, os, signal
from fserver.bench import crew

def stay(conn):
    os.closerange(1, 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    conn.send(None)
    signal.pause()

crew.KILL_TIMEOUT = 2
context = multiprocessing.get_context("fork")
peers = []
for name in ("worker", "server"):
    ours, theirs = context.Pipe()
    process = context.Process(target=stay, args=(theirs,), daemon=True)
    process.start()
    ours.recv()
    peers.append(crew.Peer(crew.Member(name, "", name), ours, process))
    print(process.pid)
process.kill = lambda: None  # the server, which the kernel does not let go
try:
    with crew.ending(peers):
        raise ZeroDivisionError
except ZeroDivisionError as error:
    print(type(error).__name__)
try:
    crew.end_all(peers[1:], 0)
except crew.BenchError as error:
    print(error)
"""


def test_a_process_that_cannot_be_killed():
    """It is told, the others are ended, and this one does not wait for it when it leaves."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STAYS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = parent.communicate(timeout=60)
        killed, stayed, failed, told = out.splitlines()
        assert not os.path.exists(f"/proc/{killed}")
        os.kill(int(stayed), 0)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
    text = f"the server (pid {stayed}) has not ended 2 s after SIGKILL, because the kernel holds it"
    assert told.startswith(text) and f"/proc/{stayed}/stack" in told
    assert failed == "ZeroDivisionError" and err.startswith(f"bench: {text}")
    assert parent.returncode == 1


def test_pingpong_ends_at_wrong_data():
    with pytest.raises(WrongDataError, match="the worker received wrong data: .* byte 63 of 64"):
        pingpong.main(["--sizes", "64", "--ops", "pull"], Nodes(worker, corrupting_server))


@pytest.fixture
def few_looks(monkeypatch):
    """A look at memory takes collections of all that torch has imported."""
    monkeypatch.setattr(soak, "CHECKS", 1)
    monkeypatch.setattr(soak, "PARTS", 2)


def test_soak(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "PARTS", 4)
    path = tmp_path / "soak.json"
    argv = ["--count", "100", "--warmup", "100", "--size", "64", "--json", str(path)]
    assert soak.main([*argv, "--limit", "1000000"], Nodes(worker, leaking_server)) == 1
    out, err = capsys.readouterr()
    assert "100 push_pulls of 64 B each way" in out and "growth" in out
    assert "but the limit is 1000000" in err
    rows = json.loads(path.read_text())["rows"]
    assert [r["role"] for r in rows] == ["worker", "server"]
    for row in rows:
        sizes = row["resident_bytes"]
        assert len(sizes) == 1 + soak.PARTS and row["growth_bytes"] == sizes[-1] - sizes[0]
        assert row["growth_goroutines"] == 0 and min(row["goroutines"]) > 0
        assert row["growth_engine_bytes"] == 0 and min(row["engine_bytes"]) > 0
        assert row["growth_go_bytes"] < 1_000_000 and row["go_bytes"][0] > row["engine_bytes"][0]
        assert len(row["malloc_bytes"]) == len(row["python_blocks"]) == 2
        assert row["idle_bytes"] < 1_000_000 and row["idle_descriptors"] == 0
        assert min(row["descriptors"]) > 3
    assert rows[0]["growth_bytes"] < 1_000_000 < 100 * 65536 // 2 <= rows[1]["growth_bytes"]


def test_soak_counts_descriptors(few_looks, capsys):
    argv = ["--count", "20", "--warmup", "20", "--size", "64", "--limit", "100000000"]
    assert soak.main(argv, Nodes(worker, hoarding_server)) == 1
    assert "descriptors grew by" in capsys.readouterr().err


def test_soak_counts_the_engine(few_looks, capsys):
    argv = ["--count", "10", "--warmup", "10", "--size", "64", "--limit", "100000000"]
    assert soak.main(argv, Nodes(worker, opening_server)) == 1
    assert "engine's heap grew by" in capsys.readouterr().err


def test_threads(tmp_path, capsys):
    path = tmp_path / "threads.json"
    argv = ["threads", "--iters", "50", "--rounds", "2", "--json", str(path)]
    assert bench.main([*argv, "--transport", "auto"]) == 0
    assert "an exchange of two threads takes" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert [row["threads"] for row in found["rows"]] == [1, 2] and found["ratio"] > 0


@pytest.mark.parametrize(
    ("beside", "text"),
    [("links", "a thread that calls links()"), ("doctor", "`fserver doctor --json`, again")],
)
def test_threads_beside_something(beside, text, tmp_path, capsys):
    path = tmp_path / "threads.json"
    argv = ["--beside", beside, "--iters", "50", "--rounds", "1", "--json", str(path)]
    assert bench.main(["threads", *argv]) == 0
    assert f"an exchange beside {text}" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["threads"] for row in rows] == [1, beside]
    assert all(row["per_exchange_us"] > 0 for row in rows)


def test_threads_beside_a_doctor_that_fails(monkeypatch):
    monkeypatch.setattr(threads, "DOCTOR", [sys.executable, "-c", "raise SystemExit('no way')"])
    with pytest.raises(BenchError, match="fserver doctor ended with status 1: no way"):
        threads.main(["--beside", "doctor", "--iters", "50", "--rounds", "1"])


def test_idle(tmp_path, capsys):
    path = tmp_path / "idle.json"
    assert bench.main(["idle", "--seconds", "0.5", "--json", str(path)]) == 0
    assert "blocked in get_batch" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(0 <= r["cpu_percent"] < 60 for r in rows)


def test_port_is_held():
    with crew.free_port("127.0.0.1") as address:
        port = int(address.rpartition(":")[2])
        with Listener(("127.0.0.1", port)) as listener:
            assert listener.address[1] == port


@needs_compiler
def test_ipc(tmp_path):
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64", "--rounds", "2", "--iters", "20", "--json", str(path)]
    assert bench.main(["ipc", *argv, "--shared-sizes", "64K"]) == 0
    *all_rows, sent, shared = written(path, "ipc")
    assert (sent["transport"], shared["transport"]) == ("cma", "cma shared")
    for row in (sent, shared):
        assert (row["op"], row["bytes_out"], row["bytes_back"]) == ("pull", 64 << 10, 64)
        assert row["skipped"] or row["p50_us"] > 0
    rows = {row["transport"]: row for row in all_rows}
    assert list(rows) == ["tcp", "cma", "raw tcp", "raw cma", "raw shm"]
    for way in baseline.HOST_WAYS:
        assert rows[way]["p50_us"] > 0 and rows[way]["ratio"] is None
    for transport in ipc.TRANSPORTS:
        row, way = rows[transport], baseline.OF_TRANSPORT[transport]
        if row["skipped"]:
            assert transport == "cma" and row["p50_us"] is None
            continue
        assert row["baseline"] == way and row["baseline_p50_us"] == rows[way]["p50_us"]
        assert row["ratio"] == pytest.approx(row["p50_us"] / rows[way]["p50_us"], abs=0.001)


def test_matrix(tmp_path):
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64", "--rounds", "1", "--iters", "10", "--json", str(path)]
    assert bench.main(["matrix", *argv, "--ops", "push,push_pull"]) == 0
    rows = written(path, "matrix")
    assert [(r["place"], r["op"]) for r in rows if r["device"] == "cpu"] == [
        (place, op) for place in matrix.PLACES for op in ("push", "push_pull")
    ]
    for row in rows:
        if row["device"] == "gpu" and not torch.cuda.is_available():
            assert row["p50_us"] is None and "GPU" in row["skipped"]
        elif row["place"] == "remote" and not matrix.own_address():
            assert "only a loopback address" in row["skipped"]
        else:
            assert row["p50_us"] > 0 and row["skipped"] is None
    assert all(r["transport"] == "tcp" for r in rows if r["place"] == "remote" and r["p50_us"])


@needs_compiler
def test_matrix_of_two_hosts(tmp_path, port):
    path = tmp_path / "rows.json"
    common = ["matrix", "--scheduler", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    argv = ["--sizes", "4K", "--ops", "pull", "--rounds", "1", "--iters", "10", "--json", str(path)]
    with ThreadPoolExecutor(1) as pool:
        server_status = pool.submit(bench.main, [*common, "--role", "server"])
        assert bench.main([*common, "--role", "worker", *argv]) == 0
        assert server_status.result(60) == 0
    row, gpu = written(path, "matrix")
    assert row["bytes_back"] == 4096 and row["p50_us"] > 0 and gpu["skipped"]
    assert row["baseline"] == "raw tcp" and row["ratio"] > 0
    assert len(row["baseline_p50_us_rounds"]) == row["rounds"] == 1


@needs_compiler
def test_matrix_of_two_hosts_where_the_other_has_no_compiler(tmp_path, port, capsys):
    path = tmp_path / "rows.json"
    common = ["matrix", "--scheduler", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    argv = ["--sizes", "4K", "--ops", "pull", "--rounds", "1", "--iters", "10", "--json", str(path)]
    env = {**os.environ, "CC": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fserver", "bench", *common, "--role", "server"]
    with subprocess.Popen(command, env=env) as other:
        assert bench.main([*common, "--role", "worker", *argv]) == 0
        assert other.wait(60) == 0
    row, _ = written(path, "matrix")
    assert row["p50_us"] > 0 and row["ratio"] is None
    assert row["baseline_missing"].startswith("the host of the server: no-such-compiler: not found")
    assert "there is no baseline: the host of the server" in capsys.readouterr().err


def test_af(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--layers", "4", "--bytes", "1K", "--back-bytes", "2K", "--tensors", "3"]
    argv += ["--back-tensors", "2", "--workers", "2", "--servers", "2", "--in-flight", "2"]
    argv += ["--rounds", "1", "--iters", "2", "--json", str(path)]
    assert bench.main(["af", *argv]) == 0
    assert "the application, until it calls respond" in capsys.readouterr().out
    (row,) = written(path, "af")
    assert (row["bytes_out"], row["bytes_back"]) == (2 * 3 * 1024, 2 * 2 * 2048)
    assert row["iters"] == 2 * 4 * 3 and row["step_ms"] > 0
    assert row["tokens_per_s"] == pytest.approx(1e6 / (4 * 3 * row["p50_us"]), rel=0.01)
    assert row["of_budget"] == pytest.approx(row["p50_us"] / 273, abs=0.001)
    assert row["parts_us"].keys() == stamps.PARTS.keys()
    assert all(us >= 0 for us in row["parts_us"].values())
    # With two under way a request waits for the one before it, inside of these parts.
    assert sum(row["parts_us"].values()) < 3 * row["p99_us"]


def test_fanin(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--groups", "1,3,5", "--processes", "2", "--rounds", "1", "--iters", "20"]
    assert bench.main(["fanin", *argv, "--json", str(path)]) == 0
    assert "time of a batch = " in capsys.readouterr().out
    rows = written(path, "fanin")
    assert [row["groups"] for row in rows] == [1, 3, 5]
    for row in rows:
        assert row["per_request_us"] == pytest.approx(row["p50_us"] / row["groups"], abs=0.001)
    assert json.loads(path.read_text())["fit"].keys() >= {"per_group_us", "r2", "exponent"}


def test_idle_groups_beside(tmp_path):
    path = tmp_path / "rows.json"
    argv = ["--idle", "2", "--rounds", "2", "--iters", "50", "--json", str(path)]
    assert bench.main(["fanin", *argv]) == 0
    rows = written(path, "fanin")
    assert [(row["groups"], row["idle"], row["iters"]) for row in rows] == [(1, 0, 50), (1, 2, 50)]
    ratio = json.loads(path.read_text())["idle_ratio"]
    assert ratio == pytest.approx(rows[1]["p50_us"] / rows[0]["p50_us"], abs=0.001)


@needs_compiler
def test_verify(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--seed", "7", "--steps", "12", "--max-bytes", "64K", "--json", str(path)]
    assert bench.main(["verify", *argv]) == 0
    out = capsys.readouterr().out
    assert "seed 7\n" in out and out.endswith("no difference\n")
    rows = written(path, "verify")
    checked = json.loads(path.read_text())["checked"]
    assert checked["steps"] == 12 and checked["requests"] >= 24
    assert checked["tensors"] and checked["bytes"]
    assert checked["transport"] == "tcp" and checked["difference"] is None

    # What is timed is of the same plan, and is counted at each server.
    dtypes = randoms.usable_dtypes()
    want = [
        (
            2 * sum(t.make().nbytes for request in requests for t in request.push),
            sum(t.make().nbytes for r in requests for answers in r.pull for t in answers),
        )
        for step in range(verify.TIMED)
        for requests in randoms.plan(7, step, 2, 2, 1 << 16, dtypes)
    ]
    timed = [one for row in rows for one in row["timed"]]
    assert sorted((one["bytes_out"], one["bytes_back"]) for one in timed) == sorted(want)
    assert sum(row["rounds"] for row in rows) == len(timed)
    for row in rows:
        assert row["transport"] == "tcp" and row["baseline"] == "raw tcp"
        assert row["p50_us"] > 0 and row["first_p50_us"] > 0 and row["ratio"] > 0
        sizes = [one["bytes_out"] + one["bytes_back"] for one in row["timed"]]
        assert row["bytes_up_to"] is None or max(sizes) <= row["bytes_up_to"]
        for one in row["timed"]:
            assert one["again_us"] > 0 and one["first_us"] > 0 and one["baseline_us"] > 0


def test_verify_without_baseline(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--seconds", "0.01", "--max-bytes", "1K", "--no-baseline", "--json", str(path)]
    assert bench.main(["verify", *argv, "--transport", "auto"]) == 0
    assert capsys.readouterr().out.endswith("no difference\n")
    assert json.loads(path.read_text())["checked"]["steps"] == verify.CHUNK
    for row in written(path, "verify"):
        assert row["p50_us"] > 0 and row["ratio"] is None and row["baseline"] is None
        assert row["baseline_missing"] == "--no-baseline"


def test_verify_sees_one_wrong_byte(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--seed", "7", "--steps", "12", "--max-bytes", "64K", "--json", str(path)]
    argv += ["--plot", str(tmp_path / "plot.png")]  # of which there will be none
    assert verify.main(argv, Nodes(server=corrupting_node)) == 1
    err = capsys.readouterr().err
    assert "the workers received wrong data: seed 7, step " in err
    difference = json.loads(path.read_text())["checked"]["difference"]
    assert f"bench: {difference}" in err
    assert "answer" in difference and " of server " in difference
    assert written(path, "verify") == []  # it was in the first steps


def test_verify_rows_are_bins_of_sizes():
    timed = [
        {"bytes_out": out, "bytes_back": 0, "first_us": us, "again_us": us, "baseline_us": raw}
        for out, us, raw in [
            (0, 4.0, 2.0),
            (4096, 6.0, 1.0),
            (4097, 9.0, None),
            (1 << 30, 1.0, 1.0),
        ]
    ]
    small, medium, large = verify._rows("tcp", timed, "raw tcp", None)
    assert [row["bytes_up_to"] for row in (small, medium, large)] == [4096, 65536, None]
    assert (small["rounds"], small["p50_us"], small["baseline_p50_us"]) == (2, 5, 1.5)
    assert small["ratio"] == 4 and small["timed"] == timed[:2]
    assert medium["ratio"] is None and medium["baseline"] is None and large["ratio"] == 1


@pytest.mark.parametrize(
    ("benchmark", "argv"),
    [
        (pingpong, ["--sizes", "64", "--no-baseline"]),
        (ipc, ["--sizes", "64", "--transport", "tcp"]),
        (matrix, ["--sizes", "64", "--places", "local", "--no-baseline"]),
        (af, ["--layers", "2", "--bytes", "1K", "--back-bytes", "1K", "--no-baseline"]),
        (fanin, ["--groups", "3", "--no-baseline"]),
        (fanin, ["--idle", "1", "--no-baseline"]),
    ],
)
def test_all_see_wrong_bytes(benchmark, argv):
    with pytest.raises(WrongDataError, match=r"byte \d+ of \d+ is \d+, not \d+ \(exchange \d+\)"):
        benchmark.main([*argv, "--iters", "20"], Nodes(server=corrupting_node))


def test_plans_follow_from_the_seed():
    dtypes = randoms.usable_dtypes()
    assert {torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex64} <= set(dtypes)

    def plans(seed):
        return [randoms.plan(seed, step, 2, 3, 1 << 16, dtypes) for step in range(50)]

    assert plans(1) == plans(1) != plans(2)
    tensors = [
        t
        for step in plans(1)
        for requests in step
        for request in requests
        for t in [*request.push, *(t for answers in request.pull for t in answers)]
    ]
    assert {len(t.shape) for t in tensors} == set(range(randoms.MAX_DIMS + 1))
    assert {t.dtype for t in tensors} == set(dtypes)
    assert any(0 in t.shape for t in tensors)
    assert max(t.make().nbytes for t in tensors) <= 1 << 16
    few = tensors[0]
    few.check(few.make(), "itself")
    with pytest.raises(WrongDataError, match="a copy"):
        few.check(few.make().reshape(-1, 1, 1), "a copy")


# Plots.

ROW = {
    "transport": "tcp",
    "op": "push_pull",
    "bytes_out": 64,
    "bytes_back": 64,
    "p50_us": 20.0,
    "baseline_p50_us": 10.0,
    "ratio": 2.0,
    "skipped": None,
}
DRAWN = {
    "pingpong": [ROW, {**ROW, "transport": "gloo"}, {**ROW, "op": "push", "bytes_out": 4096}],
    "ipc": [ROW, {**ROW, "transport": "raw tcp", "ratio": None, "baseline_p50_us": None}],
    "cpp": [{**ROW, "transport": name} for name in ("cma C++", "cma Python")],
    "kv": [
        {
            "place": "local",
            "memory": memory,
            "transport": "tcp",
            "op": "push",
            "bytes": 4096,
            "goodput_gbps": 3.2,
            "messages": 97000.0,
        }
        for memory in ("cpu", "cpu:gpu")
    ],
    "matrix": [
        {**ROW, "place": "local", "device": "cpu"},
        {**ROW, "place": "local", "device": "gpu"},
        {**ROW, "place": "local", "device": "gpu", "transport": "nccl"},
        {**ROW, "place": "joint", "device": "gpu", "skipped": "why"},
    ],
    "af": [{**ROW, "shape": "1 x 1", "parts_us": dict.fromkeys(stamps.PARTS, 5.0)}],
    "bond": [{**ROW, "over": name, "gbps": 1.0} for name in ("eth0", "eth0+eth1")],
    "fanin": [
        {**ROW, "groups": n, "idle": 0, "per_request_us": 20.0, "p50_us": 20.0 * n} for n in (1, 2)
    ],
    "threads": [{"threads": n, "per_exchange_us": 5.0} for n in (1, "links")],
    "verify": [
        {
            "timed": [
                {"bytes_out": 64, "bytes_back": 0, "again_us": 20.0, "baseline_us": 10.0},
                {"bytes_out": 0, "bytes_back": 0, "again_us": 20.0, "baseline_us": None},
            ]
        }
    ],
    "idle": [{"role": "worker", "state": "no call", "cpu_percent": 0.1}],
    "soak": [{"role": "worker", "resident_bytes": [1000, 2000, 2000]}],
}


def test_every_benchmark_has_a_plot():
    assert DRAWN.keys() == plot.DRAW.keys() == bench.BENCHMARKS.keys() - {"graph"}


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="no matplotlib (pip install -r requirements/bench.txt)",
)
@pytest.mark.parametrize("name", DRAWN)
def test_plot(name, tmp_path):
    path = tmp_path / "plot.png"
    plot.save(str(path), name, DRAWN[name], "a machine")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    with pytest.raises(BenchError, match="--plot .*: nothing was measured"):
        plot.save(str(path), name, [], "a machine")
    with pytest.raises(BenchError, match="--plot .*/no/where.png: "):
        plot.save(str(tmp_path / "no/where.png"), name, DRAWN[name], "a machine")


def test_plot_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert bench.main(["idle", "--plot", "x.png"]) == 1
    assert "pip install 'fserver[bench]'" in capsys.readouterr().err
