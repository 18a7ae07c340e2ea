"""`fserver bench kv`: bench_kv.cc in all its roles, and the table."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from fserver import bench
from fserver.bench import baseline, kv
from fserver.bench.errors import BenchError
from fserver.run import free_port

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    """Unoptimised: that takes less time."""
    compiler, options, *rest = baseline.LANGUAGES["cc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(baseline.LANGUAGES, "cc", (compiler, [*options, "-O0"], *rest))
        yield baseline.compiled("bench_kv.cc")


@pytest.fixture
def ready(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the program compiled."""
    monkeypatch.setattr(kv, "compiled", lambda source: program)


@needs_compiler
def test_rows(
    ready: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BENCHMARK_NTHREAD", "2")
    monkeypatch.setenv("ENABLE_RECV_BUFFER", "1")
    monkeypatch.setenv("BENCHMARK_ITER", "77")  # --iters and --rounds say it
    monkeypatch.setenv("BENCHMARK_SIZE", "77")  # --sizes
    path = tmp_path / "out.json"
    argv = "kv --sizes 100 --keys 3 --workers 2 --servers 2 --rounds 2 --iters 3"
    argv += " --places local,joint --ops push,push_pull --transport cma"
    assert bench.main([*argv.split(), "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["place"], row["op"], row["bytes"]) for row in rows] == [
        (place, op, 100) for place in ("local", "joint") for op in ("push", "push_pull")
    ]
    for row in rows:
        assert row["rounds"] == 2 and row["iters"] == 3 and row["transport"] == "cma"
        assert 0 <= row["goodput_min"] <= row["goodput_gbps"] <= row["goodput_max"]
        # Both directions are messages; the bytes are those of one.
        each = 2 if row["op"] == "push_pull" else 1
        bits = row["messages"] / each * row["bytes"] * 8 / 1e9
        assert row["goodput_gbps"] == pytest.approx(bits, rel=0.2, abs=0.0005)
    assert "goodput_gbps" in capsys.readouterr().out


@pytest.mark.long
@needs_compiler
def test_two_hosts(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with free_port("127.0.0.1") as address:
        command = [sys.executable, "-m", "fserver", "bench", "kv", "--scheduler", address]
        command += "--sizes 64,1K --keys 2 --rounds 2 --iters 2 --ops pull --transport tcp".split()
        server = subprocess.Popen([*command, "--role", "server"])
        try:
            worker = subprocess.run(
                [*command, "--role", "worker", "--json", str(path)], timeout=600
            )
            assert worker.returncode == 0 and server.wait(600) == 0
        finally:
            server.kill()
            server.wait()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["place"], row["op"], row["bytes"]) for row in rows] == [
        ("remote", "pull", 64),
        ("remote", "pull", 1024),
    ]


def run(program: Path, *arguments: str, **variables: str) -> str:
    """What the program prints when it refuses something."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "TEST_NUM_"))}
    ran = subprocess.run(
        [program, *arguments],
        env={**env, "DMLC_ROLE": "worker", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1 and ran.stdout == ""
    return ran.stderr


@needs_compiler
def test_arguments_of_the_program(program: Path) -> None:
    for arguments, text in (
        (["4k"], 'BYTES is "4k", want a whole number from 1 to 4294967296'),
        (["0"], 'BYTES is "0"'),
        (["99999999999999999999999"], "BYTES is"),
        (["8", "-1"], 'ROUNDS is "-1"'),
        (["8", "1", "4"], 'MODE is "4", want push_then_pull, push_pull, push or pull'),
        (["8", "1", "push", "x"], 'the fifth argument is "x"'),
    ):
        assert text in run(program, *arguments)
    for name, least in (
        ("NUM_KEY_PER_SERVER", 1),
        ("LOG_DURATION", 1),
        ("TOTAL_DURATION", 1),
        ("BENCHMARK_NTHREAD", 1),
        ("BENCHMARK_SIZE", 1),
        ("BENCHMARK_ITER", 1),
        ("BENCHMARK_WARMUP", 0),
    ):
        text = f'{name} is "none", want a whole number from {least} to'
        assert text in run(program, **{name: "none"})
    assert 'GetRole: role is "king"' in run(program, DMLC_ROLE="king")
    assert 'DMLC_NODE_RANK="x"' in run(program, DMLC_NODE_RANK="x")


@needs_compiler
def test_variables_of_the_program(program: Path) -> None:
    """They take the place of arguments. With DEBUG_MODE a server writes a line for each request."""
    variables = (
        "BENCHMARK_SIZE=3000 BENCHMARK_ITER=4 BENCHMARK_WARMUP=3 LOG_DURATION=2 DEBUG_MODE=1"
    )
    variables += " NUM_KEY_PER_SERVER=2 SKIP_DEV_ID_CHECK=1 STEPMESH_BACKEND=CPU"
    command = [sys.executable, "-m", "fserver", "run", "--workers", "1", "--servers", "1", "--"]
    ran = subprocess.run(
        [*command, str(program), "99", "9", "push"],
        env={**os.environ, **dict(v.split("=") for v in variables.split())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = ran.stdout + ran.stderr
    assert ran.returncode == 0, out
    assert len(re.findall(r"worker 0: push: Application goodput: .* count = 2\n", out)) == 2
    # Of each of 2 keys: 2 checks, and 3 + 4 rounds.
    assert len(re.findall(r"server 0: push of 3000 bytes of key \d+ by 0\n", out)) == 2 * (
        2 + 3 + 4
    )
    assert len(re.findall(r"server 0: pull of 3000 bytes of key \d+ by 0\n", out)) == 2 * 2


@needs_compiler
def test_a_process_that_fails(ready: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "TIMEOUT", 60.0)
    argv = "--sizes 64 --keys 2 --iters 2 --rounds 1 --places local --ops push".split()
    with pytest.raises(BenchError, match='FSERVER_TRANSPORT="pigeon"'):
        kv.main([*argv, "--transport", "pigeon"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--keys 0", "argument --keys: '0': want a whole number, 1 or more"),
        ("--sizes 4", "argument --sizes: '4': want 8 bytes or more"),
        ("--ops sum", "argument --ops: 'sum': want some of push, pull, push_pull"),
        ("--places moon", "argument --places: 'moon': want some of local, joint"),
        ("--memory disk", "argument --memory: 'disk': want some of cpu, cpu:gpu, gpu:cpu, gpu"),
        ("--workers 2", "--places joint: want the same number of --workers and --servers"),
        ("--role worker", "--scheduler and --role: give both, or neither"),
        ("--role worker --scheduler here", "argument --scheduler: 'here': want HOST:PORT"),
    ],
)
def test_options(argv: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv.main(argv.split())
    assert text in capsys.readouterr().err


@needs_compiler
def test_no_gpu(ready: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("STEPMESH_BACKEND", "CPU")
    assert kv.main("--memory cpu:gpu --sizes 64 --ops push --transport cma".split()) == 0
    assert capsys.readouterr().out.count("skipped: this host has no GPU that can be used") == 2


def test_cma_stays_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two hosts its rows are skipped, as the other host skips them."""
    monkeypatch.setattr(kv, "_logged", lambda *_: "")
    options = Namespace(role="worker", keys=1, servers=1, iters=1)
    run = Namespace(options=options)
    for transport, reason in (("cma", "it stays inside a host"), ("tcp", None)):
        case = kv.Case("remote", "cpu", transport, "push", 64)
        assert kv._row(run, 0, case)["skipped"] == reason


def test_figures() -> None:
    text = "\n".join(
        f"[12:00:00] INFO x.cc:1: worker {worker}: push: Application goodput: {gbps} Gbps, "
        f"{gbps * 100} messages/s. count = 10"
        for worker, rounds in ((0, (1.5, 3.0, 2.0)), (1, (10.0, 20.0, 30.0)))
        for gbps in rounds
    )
    assert kv.figures(f"{text}\nanother line") == {
        "rounds": 3,
        "goodput_gbps": 22.0,
        "goodput_min": 11.5,
        "goodput_max": 33.0,
        "messages": 2200.0,
    }
    assert kv.figures("")["goodput_gbps"] is None
