"""`fserver bench pingpong`: places, devices, transports, and what is beside fserver."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bench_fakes import (
    corrupting_server,
    dying_server,
    needs_compiler,
    worker,
    written,
)

from fserver import bench
from fserver.bench import baseline, libraries, pingpong, run
from fserver.bench import options as opts
from fserver.bench.crew import MAKE, Case, Crew
from fserver.bench.errors import BenchError, WrongDataError


def cases(sizes, ops, *more):
    argv = ["--sizes", sizes, "--ops", ops, *more]
    return pingpong.cases(pingpong.PARSER.parse_args(argv))


def test_cases():
    moved = [(c.op, c.out, c.back) for c in cases("4K:8K", "push,pull,push_pull")]
    assert moved == [
        ("push", (4096,), ()),
        ("pull", (64,), (8192,)),
        ("push_pull", (4096,), (8192,)),
    ]
    parsed = pingpong.PARSER.parse_args(["--sizes", "64,4K:8K"])
    assert parsed.sizes == [(64, 64), (4096, 8192)]
    keys = [c.key for c in cases("64,4K", "push,pull")]
    assert len(set(keys)) == 4
    several = cases("64:32,8", "push,push_pull", "--tensors", "3")
    assert several[1].out == (64,) * 3 and several[1].back == (32,) * 3
    assert [c.key for c in several] == [0, 3, 6, 9]
    model = cases("8:16", "pull,push_pull", *"--stages 2 --layers 5 --servers 3".split())
    assert [c.key for c in model] == [0, 2] and model[1].moved == (24, 48)
    assert all((c.stages, c.unit) == (2, 10) for c in model)


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
    for transport, some in (("tcp", rows[::2]), ("cma", rows[1::2])):
        assert [(r["op"], r["bytes_out"], r["bytes_back"]) for r in some] == [
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
        for row in some:
            assert (row["device"], row["groups"]) == ("cpu", 1)
            assert (row["transport"], row["baseline"]) == (transport, f"raw {transport}")
            assert (row["iters"], row["rounds"]) == (20, 2)
            assert 0 < row["p50_us"] <= row["p99_us"] and 0 < row["baseline_p50_us"]
            assert row["ratio"] == pytest.approx(row["p50_us"] / row["baseline_p50_us"], abs=0.001)
            assert len(row["p50_us_rounds"]) == len(row["baseline_p50_us_rounds"]) == 2


def played_by(monkeypatch, server):
    for role, make in (("worker", worker), ("server", server)):
        monkeypatch.setitem(MAKE, role, make)


def test_pair_reports_a_peer_that_died(monkeypatch):
    played_by(monkeypatch, dying_server)
    with pytest.raises(BenchError, match="the server ended with status 9"):
        pingpong.main(["--sizes", "64", "--no-baseline"])


def test_pingpong_ends_at_wrong_data(monkeypatch):
    played_by(monkeypatch, corrupting_server)
    with pytest.raises(WrongDataError, match="the worker received wrong data: .* byte 63 of 64"):
        pingpong.main(["--sizes", "64", "--ops", "pull"])


def test_what_cannot_be_had_is_skipped(tmp_path, capsys):
    """If there is something else. Alone, it is an error."""
    path = tmp_path / "rows.json"
    argv = ["pingpong", "--sizes", "64", "--ops", "push", "--iters", "10", "--no-baseline"]
    assert bench.main([*argv, "--transport", "pigeon"]) == 1
    assert 'failed: conf: FSERVER_TRANSPORT="pigeon": ' in capsys.readouterr().err
    assert bench.main([*argv, "--transport", "pigeon,tcp", "--json", str(path)]) == 0
    pigeon, tcp = written(path, "pingpong")
    assert (pigeon["transport"], pigeon["p50_us"]) == ("pigeon", None)
    assert pigeon["skipped"].startswith('conf: FSERVER_TRANSPORT="pigeon": ')
    assert tcp["p50_us"] > 0 and tcp["skipped"] is None
    assert pigeon.keys() == tcp.keys()


@needs_compiler
def test_inside_a_host(tmp_path):
    """All transports, with shared tensors, C++ and the raw program that has no transport."""
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64K:64", "--rounds", "2", "--iters", "20", "--json", str(path)]
    argv += ["--ops", "push_pull", "--transport", "tcp,cma", "--shared", "--beside", "shm,c++"]
    assert bench.main(["pingpong", *argv]) == 0
    rows = {row["transport"]: row for row in written(path, "pingpong")}
    ours = ["tcp", "tcp shared", "cma", "cma shared"]
    assert list(rows) == [*ours, "raw shm", "tcp C++", "cma C++"]
    for name, row in rows.items():
        assert (row["op"], row["bytes_out"], row["bytes_back"]) == ("push_pull", 64 << 10, 64)
        assert (row["iters"], row["rounds"]) == (20, 2) and row["p50_us"] > 0
        transport = name.partition(" ")[0]
        if transport in rows:
            assert row["baseline"] == f"raw {transport}"
            both = row["baseline_p50_us_rounds"], rows[transport]["baseline_p50_us_rounds"]
            assert both[0] == both[1]  # they took turns with the same
            assert row["ratio"] == pytest.approx(row["p50_us"] / row["baseline_p50_us"], abs=0.001)
    assert rows["raw shm"]["ratio"] is None and rows["raw shm"]["baseline"] is None


def test_shared_tensors_are_shared(monkeypatch):
    """Only those of the second pair."""
    seen = []

    def all_do(self, method, *cases):
        seen.extend(c.shared for c in cases)
        return [[]]

    monkeypatch.setattr(Crew, "all", all_do)
    monkeypatch.setattr(Crew, "transport", lambda self: "cma")
    monkeypatch.setattr(run, "take_turns", lambda *_: None)
    argv = ["--sizes", "64,4K", "--ops", "push", "--transport", "cma", "--shared", "--no-baseline"]
    assert pingpong.main(argv) == 0
    assert seen == [False, True] * 2


def test_a_program_in_cpp_that_fails(monkeypatch, tmp_path):
    """It is skipped, and the others are measured."""
    argv = ["pingpong", "--sizes", "64", "--ops", "push", "--iters", "10", "--no-baseline"]
    argv += ["--beside", "c++", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(baseline, "compiled", baseline.compiled.__wrapped__)  # not compiled before
    assert bench.main(argv) == 0
    ours, cpp = written(tmp_path / "rows.json", "pingpong")
    assert ours["p50_us"] > 0 and "no-such-compiler: not found" in cpp["skipped"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_the_program_in_cpp():
    settings = {"FSERVER_TRANSPORT": "pigeon"}
    with baseline.Baseline("C++", (-1, -1), **settings) as failing:
        failing.prepare(Case("push_pull", (64,), (64,)))
        with pytest.raises(BenchError, match='FSERVER_TRANSPORT="pigeon"'):
            failing.measure(1, 1)
    settings = {"FSERVER_TRANSPORT": "tcp"}
    with baseline.Baseline("C++", (-1, -1), **settings) as right:
        right.prepare(Case("push_pull", (64,), (32,)))  # not an echo
        assert right.measure(1, 5)["iters"] == 5


def test_devices(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--sizes", "64", "--rounds", "1", "--iters", "10", "--json", str(path)]
    argv += ["--device", "cpu,gpu", "--beside", "none"]
    assert bench.main(["pingpong", *argv, "--ops", "push,push_pull"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["device", "transport"]
    rows = written(path, "pingpong")
    assert [r["op"] for r in rows if r["device"] == "cpu"] == ["push", "push_pull"]
    for row in rows:
        if row["device"] == "gpu" and not torch.cuda.is_available():
            assert row["p50_us"] is None and "GPU" in row["skipped"]
        else:
            assert row["p50_us"] > 0 and row["skipped"] is None


TWO = ["--sizes", "4K", "--ops", "pull", "--rounds", "1", "--iters", "10"]


@pytest.fixture
def level(monkeypatch):
    """Two benchmarks at a time in this process must not both set it, and take it back."""
    monkeypatch.setenv("FSERVER_LOG", "warn")


def test_two_hosts(tmp_path, port, level):
    path = tmp_path / "rows.json"
    common = ["pingpong", "--scheduler", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    common += ["--transport", "tcp"]
    argv = [*TWO, "--json", str(path)]
    with ThreadPoolExecutor(1) as pool:
        server_status = pool.submit(bench.main, [*common, "--role", "server", *TWO])
        assert bench.main([*common, "--role", "worker", *argv]) == 0
        assert server_status.result(60) == 0
    (row,) = written(path, "pingpong")
    assert row["bytes_back"] == 4096 and row["p50_us"] > 0
    assert row["baseline"] is None and row["ratio"] is None
    assert row["baseline_missing"] == "there is no raw program that does the same"


def test_layers_between_two_hosts(tmp_path, port, level):
    path = tmp_path / "rows.json"
    common = ["af", "--scheduler", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--layers", "2"]
    common += ["--rounds", "1", "--iters", "2", "--sizes", "4K:8K"]
    with ThreadPoolExecutor(1) as pool:
        server_status = pool.submit(bench.main, [*common, "--role", "server"])
        assert bench.main([*common, "--role", "worker", "--json", str(path)]) == 0
        assert server_status.result(60) == 0
    (row,) = written(path, "pingpong")
    assert row["bytes_out"] == 7 * 4096 and row["bytes_back"] == 7 * 8192 and row["p50_us"] > 0
    assert row["parts_us"]["network"] > 0 and row["baseline"] is None


class GpuCrew(Crew):
    """A pair with tensors on two GPUs, which knows how they travel when they have."""

    moved = False

    def __init__(self):
        super().__init__([])
        self.gpus = (0, 1)

    def all(self, method, *args, **_):
        self.moved = self.moved or method == "verify"
        if method == "measure":
            return [{"iters": args[1], "p50_us": 20.0, "p99_us": 30.0}, None]
        return [[]]

    def transport(self):
        return "cudaipc" if self.moved else ""


def test_on_gpus(monkeypatch, tmp_path):
    """Which raw program, and which libraries."""
    opened = []
    path = tmp_path / "rows.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pingpong, "_pair", lambda *_: GpuCrew())
    monkeypatch.setattr(run.Run, "raw", lambda *args: opened.append(args[1:3]))
    beside = [run.Way(way, reason="not here") for way in opts.ON_GPUS]
    asked = []
    monkeypatch.setattr(libraries, "beside", lambda *args: asked.append(args) or beside)
    argv = ["--device", "gpu", "--sizes", "4M", "--ops", "push_pull", "--rounds", "2"]
    assert pingpong.main([*argv, "--iters", "5", "--json", str(path)]) == 0
    assert opened == [("cudaipc", (0, 1))]
    assert asked[0][1:5] == ([*opts.ON_GPUS], None, (0, 1), 4 << 20)
    ours, *others = written(path, "pingpong")
    assert (ours["transport"], ours["p50_us"], ours["device"]) == ("cudaipc", 20.0, "gpu")
    assert [row["transport"] for row in others] == [*opts.ON_GPUS]
    assert all(row["skipped"] == "not here" and row["p50_us"] is None for row in others)
