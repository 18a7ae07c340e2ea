"""The raw baselines of `fserver bench`: programs in C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
from bench_fakes import needs_compiler

from fserver.bench import baseline
from fserver.bench.errors import BenchError
from fserver.bench.run import Run


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
    with baseline.program(way[0], None, way[1]) as raw_echo:
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
    with baseline.program(way[0], None, "0,2") as raw_echo:
        raw_echo.prepare(64, 64)
        with pytest.raises(BenchError, match="rawgpu: there is no GPU 2"):
            raw_echo.measure(0, 1)
    monkeypatch.setenv("FAKECUDA_LOSE", "1")
    with baseline.program(way[0], None, way[1]) as raw_echo:
        raw_echo.prepare(64, 64)
        with pytest.raises(BenchError, match="rawgpu: iteration 6: got the data of 0"):
            raw_echo.measure(0, 5)


@needs_compiler
@pytest.mark.parametrize("way", baseline.WAYS, indirect=True)
def test_baseline_ends_when_its_server_dies(way):
    with baseline.program(way[0], None, way[1]) as raw_echo:
        raw_echo.prepare(64, 64)
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
def test_a_compiler_that_is_not_there(source, variable, package, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(BenchError, match=f"no-such-compiler: not found: .*install {package}"):
        baseline.compiled(source)
    assert list((tmp_path / "fserver").iterdir()) == []


def test_baseline_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(baseline, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "raw.h").write_text("")
    (tmp_path / "rawecho.c").write_text("int main(void) { return undeclared; }\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    with Run("test", Namespace(no_baseline=False, cores=None, json=None)) as run:
        raw = run.raw("tcp")
        assert raw.player is None and "no-such-compiler" in raw.reason
        assert "bench: raw tcp: no-such-compiler" in capsys.readouterr().err
        if shutil.which("cc"):
            monkeypatch.setenv("CC", "cc")
            with pytest.raises(BenchError, match="undeclared"):
                baseline.compiled("rawecho.c")
        cache = tmp_path / "cache" / "fserver"
        assert list(cache.iterdir()) == []
        if shutil.which("cc"):
            (tmp_path / "rawecho.c").write_text("int main(void) { return 3; }\n")
            raw = run.raw("tcp", "here")
            missing = "the baseline raw tcp ended with status 3"
            assert raw.player is None and raw.reason.startswith(missing)
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


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_a_program_in_cpp_depends_on_fservers_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(baseline, "SOURCES", tmp_path)
    monkeypatch.setattr(baseline, "INCLUDE", tmp_path / "include")
    (tmp_path / "empty.cc").write_text("int main() {}\n")
    header = tmp_path / "include/ps/ps.h"
    header.parent.mkdir(parents=True)
    header.write_text("// old\n")
    first = baseline.compiled("empty.cc")
    assert baseline.compiled("empty.cc") == first
    header.write_text("// new\n")
    assert baseline.compiled("empty.cc") != first
