"""`fserver bench`: its arithmetic, tables and options, and short runs of benchmarks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace

import pytest
import torch
from bench_fakes import corrupting_node, written

from fserver import bench
from fserver.bench import MODEL, crew, options, pingpong, report
from fserver.bench.crew import Case
from fserver.bench.errors import BenchError, WrongDataError
from fserver.bench.run import Run, Way, choose_cores, take_turns
from fserver.percentiles import percentile

COLUMNS = (*report.MEASURED, *report.RAW)


def test_percentile_is_nearest_rank():
    assert percentile([7], 50) == 7
    assert percentile([7], 99) == 7
    assert percentile([1, 2, 3, 4], 50) == 2
    assert percentile([1, 2, 3], 50) == 2
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 102), 99) == 100


def test_interval_of_the_median():
    assert report.median_interval([*range(20, 0, -1)]) == (6, 15)
    assert report.median_interval([*range(1, 7)]) == (1, 6)
    assert report.median_interval([*range(1, 101)]) == (40, 61)
    assert report.median_interval([3, 1, 2]) == (1, 3)


@pytest.mark.parametrize("count", [6, 20, 51])
def test_interval_has_the_median_at_least_19_times_in_20(count):
    draw = random.Random(count)
    hits = 0
    for _ in range(2000):  # of a distribution that leans far to one side; its median is 1
        low, high = report.median_interval([draw.expovariate(1) for _ in range(count)])
        hits += low <= 0.693147 <= high
    assert hits >= 0.94 * 2000


@pytest.mark.parametrize(
    ("text", "count"),
    [("64", 64), ("4K", 4096), ("4KiB", 4096), ("1m", 1 << 20), ("64 MB", None), ("2G", 2 << 30)],
)
def test_size(text, count):
    if count is None:
        with pytest.raises(ArgumentTypeError, match="want 8 bytes or more, with K, M or G"):
            options.size(text)
    else:
        assert options.size(text) == count


def test_show_size():
    shown = [report.show_size(n) for n in (0, 64, 1000, 4096, 4097, 64 << 20, 1 << 30)]
    assert shown == ["0 B", "64 B", "1000 B", "4 KiB", "4097 B", "64 MiB", "1 GiB"]


def test_row_takes_medians_over_rounds(capsys):
    measured = [{"iters": 50, "p50_us": p, "p99_us": 2 * p} for p in (12.0, 90.0, 10.0)]
    raw_rounds = [{"p50_us": p, "p99_us": 3 * p} for p in (8.0, 7.0, 10.0)]
    row = report.row("tcp", "push_pull", (3000, 3000), measured, raw_rounds)
    assert row["p50_us"] == 12 and row["p99_us"] == 24
    assert row["baseline_p50_us"] == 8 and row["baseline_p99_us"] == 24
    assert row["ratio"] == 1.5
    assert row["gbps"] == 0.5 and row["baseline_gbps"] == 0.75
    assert row["p50_us_rounds"] == [12, 90, 10] and row["rounds"] == 3 and row["iters"] == 50

    case, missing = Case("push", (64,)), Way("raw tcp", reason="no compiler")
    alone = Way("tcp", "player", missing, rounds=measured).row(case)
    assert alone["ratio"] is None and alone["baseline_p50_us"] is None
    assert alone["baseline"] is None and alone["baseline_missing"] == "no compiler"

    skipped = Way("cma", reason="no such thing").row(case)
    assert skipped["p50_us"] is None and skipped.keys() == alone.keys()

    table = report.Table(COLUMNS)
    for result in (row, alone, skipped):
        table.add(result)
    titles, *lines = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert len(titles) == len(lines[0]) == len(lines[1])
    assert lines[0].split()[:2] == ["tcp", "push_pull"] and lines[0].endswith(" 1.500")
    assert lines[1].endswith(" -") and lines[2].endswith("skipped: no such thing")


def asked(**more):
    """Options of a Run."""
    how = {"json": None, "cores": None, "no_baseline": True, "rounds": 2, "seconds": 1, "iters": 5}
    return Namespace(**{**how, **more})


def test_json(tmp_path):
    path = tmp_path / "out.json"
    with Run("pingpong", asked(json=str(path), cores=(0, 0)), COLUMNS) as run:
        run.table([[report.row("tcp", "push", (64, 0), [], [])]], 1)
    got = json.loads(path.read_text())
    assert got["bench"] == "pingpong" and got["rows"] == run.rows
    assert got["machine"]["pinned"] == [0, 0] and got["machine"]["cores"] == os.cpu_count()
    assert got["machine"]["cpu"] and got["machine"]["kernel"]
    assert "torch" in got["machine"]["versions"] and "commit" in got["machine"]["versions"]
    assert got["command"].split()[0] == "fserver"


RAW = {"one": 10.0, "two": 20.0}


def test_several_raw_baselines_take_turns():
    """A row has the one that it asks for."""
    case, seen = Case("push", (64,)), []
    with Run("test", asked(), COLUMNS) as run:
        one, two = (Way(name, Recorder(name, seen, us)) for name, us in RAW.items())
        ours = [Way("tcp", Recorder("ours", seen, 30.0), raw) for raw in (one, two, None)]
        run.measure(ours, case)
        order = [name for name, what, _ in seen if what == "measure"]
        forth = ["one", "two", "ours", "ours", "ours"]
        assert order == forth + forth[::-1]
        rows = [way.row(case) for way in ours]
    assert [row["ratio"] for row in rows] == [3.0, 1.5, None]
    assert [row["baseline"] for row in rows] == ["one", "two", None]


@pytest.mark.parametrize("missing", ["psutil", "rich"])
def test_packages_that_are_missing(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"{missing}.console", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert bench.main(["pingpong"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert missing in last and last.endswith(" (run pip install psutil rich)")


def test_torch_is_missing(tmp_path):
    """The processes that measure need it, and the one that shows does not."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    command = [
        sys.executable,
        "-m",
        "fserver",
        "bench",
        "pingpong",
        "--sizes",
        "64",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("failed: No module named 'torch'")


def test_parts_add_up():
    stamped = [100, 130, 9000, 9007, 9057, 9060, 600, 611]
    parts = report.parts([stamped])
    assert parts["network"] == ((600 - 130) - (9060 - 9000)) / 1e3
    assert sum(parts.values()) == pytest.approx((611 - 100) / 1e3)
    assert report.parts([stamped] * 3)["serve"] == 0.05


class Recorder:
    """A player that says when it is its turn; one exchange takes it `us`."""

    def __init__(self, name, turns, us, unit=1):
        self.name, self.turns, self.us, self.unit = name, turns, us, unit

    def check(self, seed):
        self.turns.append((self.name, "check", seed))

    def prepare(self, case):
        self.case = case

    def measure(self, warmup, count):
        self.turns.append((self.name, "measure", count))
        return {"iters": count, "p50_us": self.us, "p99_us": self.us}


def test_players_take_turns():
    seen = []
    a, b = (Way(name, Recorder(name, seen, us)) for name, us in (("a", 10.0), ("b", 100.0)))
    take_turns([a, b], rounds=2, seconds=0.01)
    assert [[r["iters"] for r in way.rounds] for way in (a, b)] == [[1000, 1000], [100, 100]]
    trials = [("a", "check", 0), ("a", "measure", 10), ("b", "check", 0), ("b", "measure", 10)]
    one = [("a", "measure", 1000), ("a", "check", 1), ("b", "measure", 100), ("b", "check", 1)]
    two = [(name, what, 2 if what == "check" else n) for name, what, n in one[2:] + one[:2]]
    assert seen == trials + one + two


class Quitter(Recorder):
    """Fails at its second turn."""

    def check(self, seed):
        super().check(seed)
        if seed == 2:
            raise BenchError("no more\nof that")


def test_a_spare_way_that_fails_has_no_figures_and_the_others_go_on(capsys):
    seen = []
    kinds = ("a", Recorder), ("b", Quitter), ("c", Recorder)
    ways = [Way(name, kind(name, seen, 10.0), spare=name == "b") for name, kind in kinds]
    take_turns(ways, rounds=3, seconds=1, iters=10)
    assert [len(way.rounds) for way in ways] == [3, 0, 3]
    assert [turn for turn in seen if turn[0] == "b"][-1] == ("b", "check", 2)
    assert ways[1].row(Case("push", (64,)))["skipped"] == "no more"
    assert capsys.readouterr().err == "bench: b: no more\nof that\n"
    take_turns(ways, rounds=1, seconds=1, iters=10)
    assert [len(way.rounds) for way in ways] == [1, 0, 1]


def test_a_way_that_is_not_spare_ends_the_run():
    with pytest.raises(BenchError, match="no more"):
        take_turns([Way("b", Quitter("b", [], 10.0))], rounds=3, seconds=1, iters=10)


def test_units_are_counted():
    both = [Way(name, Recorder(name, [], 10.0, unit)) for name, unit in (("raw", 1), ("af", 50))]
    take_turns(both, rounds=1, seconds=0.01)
    assert [way.rounds[0]["iters"] for way in both] == [1000, 20]
    take_turns(both, rounds=1, seconds=0.01, iters=3)
    assert [way.rounds[0]["iters"] for way in both] == [150, 3]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pingpong", "--sizes", "4"], "want 8 bytes or more"),
        (["pingpong", "--sizes", "many"], "want 8 bytes or more, with K"),
        (["pingpong", "--sizes", "64:4"], "want 8 bytes or more"),
        (["pingpong", "--sizes", "64:"], "want 8 bytes or more"),
        (["pingpong", "--ops", "push,pop"], "'pop': want some of push, pull, push_pull"),
        (["pingpong", "--rounds", "0"], "'0': want a whole number, 1 or more"),
        (["pingpong", "--cores", "0"], "'0': want A,B"),
        (["pingpong", "--cores", "a,b"], "'a,b': want A,B"),
        (["pingpong", "--seconds", "0"], "'0': want a number, more than 0"),
        (["pingpong", "--seconds", "nan"], "'nan': want a number, more than 0"),
        (["pingpong", "--seconds", "inf"], "'inf': want a number, more than 0"),
        (["pingpong", "--device", "tpu"], "'tpu': want some of cpu, gpu"),
        (["pingpong", "--role", "server"], "--scheduler and --role: give both, or neither"),
        (
            ["pingpong", "--role", "server", "--scheduler", "a:1", "--transport", "tcp,cma"],
            "--role: want one --transport",
        ),
        (
            ["af", "--role", "worker", "--scheduler", "a:1", "--workers", "2"],
            "--role: want one --transport, worker and server, --device cpu, no --beside",
        ),
        (["pingpong", "--shared", "--device", "gpu"], "--shared: want --device cpu"),
        (["af", "--layers", "2000"], "want at most 4096"),
        (["pingpong", "--groups", "0"], "'0': want a whole number, 1 or more"),
        (
            ["pingpong", "--groups", "2", "--beside", "shm"],
            "--groups: want --device cpu and no --beside",
        ),
        (
            ["pingpong", "--beside", "mpi"],
            "'mpi': want some of nccl, symm, nvshmem, nixl, gloo, shm, c++, none",
        ),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_options(argv, text, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_files_that_cannot_be_written(name, tmp_path, capsys):
    """Before anything is done."""
    argv = [name, *(["af"] if name == "graph" else [])]

    def refused(option, path):
        with pytest.raises(SystemExit) as end:
            bench.main([*argv, option, str(path)])
        out, err = capsys.readouterr()
        assert end.value.code == 2 and not out
        return err.partition(f"error: argument {option}: {str(path)!r}: ")[2].strip()

    lost = tmp_path / "no" / "where.json"
    want = "want a file that can be written"
    assert refused("--json", lost) == f"No such file or directory: {want}"
    assert refused("--json", tmp_path) == f"Is a directory: {want}"
    assert refused("--json", "") == f"No such file or directory: {want}"
    old = tmp_path / "old.json"
    old.write_text("kept")
    assert options.output(str(old)) == str(old) and old.read_text() == "kept"


def test_a_disk_that_is_full(capsys):
    argv = ["--sizes", "64", "--ops", "push", "--iters", "9", "--rounds", "1", "--no-baseline"]
    assert bench.main(["pingpong", *argv, "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err.endswith(
        "bench: --json /dev/full: No space left on device (give another file)\n"
    )


def test_core_that_is_not_ours(capsys):
    assert bench.main(["pingpong", "--cores", "0,4097"]) == 1
    assert "bench: --cores: core 4097: want one of " in capsys.readouterr().err


def test_one_core_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert choose_cores(None) == (5, 5)
    assert "both processes share core 5" in capsys.readouterr().err


def test_gpus_that_are_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["pingpong", "--device", "gpu"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err == "bench: --device gpu: torch sees no GPU (run `fserver doctor` for the reason)\n"


def test_af(tmp_path, capsys):
    path = tmp_path / "rows.json"
    argv = ["--layers", "4", "--sizes", "1K:2K", "--tensors", "3"]
    argv += ["--workers", "2", "--servers", "2"]
    argv += ["--rounds", "1", "--iters", "2", "--json", str(path)]
    assert bench.main(["af", *argv]) == 0
    out = capsys.readouterr().out
    assert "the application, until it calls respond" in out and "tokens_per_s" in out
    (row,) = written(path, "pingpong")
    assert (row["bytes_out"], row["bytes_back"]) == (2 * 3 * 1024, 2 * 3 * 2048)
    assert row["iters"] == 2 * 4 * 3 and row["step_ms"] > 0
    assert row["tokens_per_s"] == pytest.approx(1e6 / (4 * 3 * row["p50_us"]), rel=0.01)
    assert row["of_budget"] == pytest.approx(row["p50_us"] / 273, abs=0.001)
    assert row["parts_us"].keys() == report.PARTS.keys()
    assert all(us >= 0 for us in row["parts_us"].values())
    assert sum(row["parts_us"].values()) < row["p99_us"]


def test_groups(tmp_path, capsys):
    """A batch is an exchange of each group. The ratio and GB/s are of one of its requests."""
    path = tmp_path / "rows.json"
    argv = ["--groups", "1,3,5", "--rounds", "1", "--iters", "20", "--transport", "tcp"]
    argv += ["--sizes", "4K", "--ops", "push_pull", "--json", str(path)]
    assert bench.main(["pingpong", *argv]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "groups"
    rows = written(path, "pingpong")
    assert [row["groups"] for row in rows] == [1, 3, 5]
    for row in rows:
        each = row["p50_us"] / row["groups"]
        assert row["per_request_us"] == pytest.approx(each, abs=0.001)
        # GB/s has four digits behind the point: little of it is left on a busy machine.
        assert row["gbps"] == pytest.approx(8.192 / each, rel=0.01, abs=row["groups"] * 0.00005)
        if row["ratio"]:
            assert row["ratio"] == pytest.approx(each / row["baseline_p50_us"], rel=0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("benchmark", "argv"),
    [
        (pingpong, ["--sizes", "64", "--no-baseline"]),
        (pingpong, ["--sizes", "64", "--transport", "tcp,cma", "--shared"]),
        (pingpong, [*MODEL, "--layers", "2", "--sizes", "1K", "--no-baseline"]),
        (pingpong, ["--groups", "3", "--ops", "push_pull", "--sizes", "4K", "--no-baseline"]),
    ],
)
def test_all_see_wrong_bytes(benchmark, argv, monkeypatch):
    monkeypatch.setitem(crew.MAKE, "server", corrupting_node)
    with pytest.raises(WrongDataError, match=r"byte \d+ of \d+ is \d+, not \d+ \(exchange \d+\)"):
        benchmark.main([*argv, "--iters", "20"])
