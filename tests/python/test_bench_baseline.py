"""The raw baselines of `fserver bench`: programs in C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import pytest
from bench_fakes import needs_compiler

from fserver.bench import baseline
from fserver.bench.crew import Case
from fserver.bench.errors import BenchError
from fserver.bench.run import Run

ANY = (-1, -1)  # cores
RAW = [way for way in baseline.WAYS if way != "C++"]


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def moved(out: int, back: int) -> Case:
    return Case("push_pull", (out,), (back,))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is compiled yet, and what is compiled is removed."""
    monkeypatch.setattr(baseline, "compiled", baseline.compiled.__wrapped__)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(baseline, "_scratch", lambda: Namespace(name=folder))
        yield Path(folder)


def test_a_push_is_answered():
    """A program in C answers with 64 B what fserver answers with nothing."""
    raw = object.__new__(baseline.Baseline)
    raw.prepare(Case("push", (64, 64)))
    assert raw._moved == (128, 64)


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.fixture
def way(request, tmp_path, monkeypatch):
    """A raw baseline, and where it is; that of GPUs over a driver that has none."""
    if request.param != "raw gpu":
        return request.param
    source = Path(__file__).with_name("fakecuda.c")
    command = [os.environ.get("CC", "cc"), "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return request.param


@needs_compiler
@pytest.mark.parametrize("way", RAW, indirect=True)
def test_baseline(way):
    with baseline.Baseline(way, ANY, (0, 1)) as raw_echo:
        raw_echo.prepare(moved(4096, 64))
        figures = raw_echo.measure(10, 200)
        assert figures["iters"] == 200
        assert 0 < figures["min_us"] <= figures["p50_us"] <= figures["p99_us"]
        assert figures["min_us"] <= figures["mean_us"]
        raw_echo.prepare(moved(1, 1 << 20))
        assert raw_echo.measure(0, 1)["iters"] == 1

        # Between rounds it leaves the cores alone.
        both = [raw_echo._process.pid, *children(raw_echo._process.pid)]
        assert len(both) == 2
        before = sum(map(cpu_ticks, both))
        time.sleep(0.3)
        assert sum(map(cpu_ticks, both)) - before <= 1

        raw_echo.prepare(moved(0, 0))
        with pytest.raises(BenchError, match="ended with status 1: raw[a-z]+: want OUT BACK"):
            raw_echo.measure(0, 1)


@needs_compiler
@pytest.mark.parametrize("way", ["raw gpu"], indirect=True)
def test_baseline_between_gpus_says_what_is_wrong(way, monkeypatch):
    with baseline.Baseline(way, ANY, (0, 2)) as raw_echo:
        raw_echo.prepare(moved(64, 64))
        with pytest.raises(BenchError, match="rawgpu: there is no GPU 2"):
            raw_echo.measure(0, 1)
    monkeypatch.setenv("FAKECUDA_LOSE", "1")
    with baseline.Baseline(way, ANY, (0, 1)) as raw_echo:
        raw_echo.prepare(moved(64, 64))
        with pytest.raises(BenchError, match="rawgpu: iteration 6: got the data of 0"):
            raw_echo.measure(0, 5)


@needs_compiler
@pytest.mark.parametrize("way", RAW, indirect=True)
def test_baseline_ends_when_its_server_dies(way):
    with baseline.Baseline(way, ANY, (0, 1)) as raw_echo:
        raw_echo.prepare(moved(64, 64))
        raw_echo.measure(0, 5)
        (server_pid,) = children(raw_echo._process.pid)
        os.kill(server_pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="ended with status 1"):
            raw_echo.measure(0, 1 << 20)


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


@pytest.mark.parametrize(
    ("source", "variable", "package"), [("rawecho.c", "CC", "gcc"), ("cppecho.cc", "CXX", "g++")]
)
def test_a_compiler_that_is_not_there(source, variable, package, monkeypatch, fresh):
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(BenchError, match=f"no-such-compiler: not found: .*install {package}"):
        baseline.compiled(source)
    assert not list(fresh.iterdir())


def test_baseline_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(baseline, "SOURCES", tmp_path)
    (tmp_path / "raw.h").write_text("")
    (tmp_path / "rawecho.c").write_text("int main(void) { return undeclared; }\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    with Run("test", Namespace(no_baseline=False, cores=None, json=None), ()) as run:
        raw = run.raw("tcp")
        assert raw.player is None and "no-such-compiler" in raw.reason
        assert "bench: raw tcp: no-such-compiler" in capsys.readouterr().err
        if shutil.which("cc"):
            monkeypatch.setenv("CC", "cc")
            with pytest.raises(BenchError, match="undeclared"):
                baseline.compiled("rawecho.c")
            (tmp_path / "rawecho.c").write_text("int main(void) { return 3; }\n")
            run._raws.clear()
            raw = run.raw("tcp")
            missing = "the baseline raw tcp ended with status 3"
            assert raw.player is None and raw.reason.startswith(missing)


@needs_compiler
def test_compiled_once_in_a_process_and_removed_with_it(tmp_path):
    """Only its user may read the folder."""
    script = """
from fserver.bench.baseline import compiled
one = compiled("rawecho.c")
assert one == compiled("rawecho.c") and one.parent.stat().st_mode & 0o777 == 0o700
print(one)"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path)) and not list(tmp_path.iterdir())
