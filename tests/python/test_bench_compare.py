"""`fserver bench compare`: its intervals, its verdict, whose package it measures; over several
interfaces of one network namespace, and between two namespaces."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from bench_fakes import interruptible
from nodes import eventually
from test_containers import needs

from fserver import _loader, bench
from fserver.bench import compare
from fserver.bench.errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import time as _time

_Worker = Worker


def Worker(**options):
    node = _Worker(**options)
    push_pull = node.push_pull

    def slow(*args, **kwargs):
        _time.sleep(0.03)
        return push_pull(*args, **kwargs)

    node.push_pull = slow
    return node
"""


@pytest.fixture
def slow(tmp_path):
    """A checkout with the same extension, whose push_pull takes 30 ms longer."""
    package = tmp_path / "slow/fserver"
    package.mkdir(parents=True)
    for entry in (ROOT / "fserver").iterdir():
        if entry.name not in ("__init__.py", "bench", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "__init__.py").write_text((ROOT / "fserver/__init__.py").read_text() + SLOW)
    return package.parent


def test_slower_is_what_lies_wholly_above_the_limit(capsys):
    row = {"transport": "cma", "op": "push", "bytes_out": 4096, "bytes_back": 0, "ratio": 1.06}
    good = [{**row, "ratio_low": low, "ratio_high": 1.5} for low in (None, 0.9, 1.0, 1.03)]
    assert compare.judge(Path("/that"), good) == 0
    assert not capsys.readouterr().err
    assert compare.judge(Path("/that"), [*good, {**row, "ratio_low": 1.031}]) == 1
    assert capsys.readouterr().err == (
        "bench: slower than /that: cma, push, 4096 B out, 0 B back: 1.060 times\n"
    )


SHORT = "--sizes 64 --ops push_pull --rounds 1 --iters 5 --no-baseline".split()


@pytest.mark.long
def test_each_build_is_measured_by_its_own_package(slow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "HERE", slow)
    path = tmp_path / "rows.json"
    monkeypatch.setattr(compare, "LEAST", 3)
    argv = ["compare", "--rounds", "3", "--json", str(path), "--against", str(ROOT)]
    assert bench.main([*argv, "pingpong", "--transport", "cma", *SHORT]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "ratio_low" in lines[0] and len(lines) == 3
    assert f"bench: slower than {ROOT}: cma, push_pull, 64 B out, 64 B back: " in err
    theirs, ours = json.loads(path.read_text())["rows"]
    assert theirs["transport"] == ours["transport"] == "cma"
    assert theirs["way"] == theirs["baseline"] == ours["baseline"]
    assert theirs["way"].startswith(str(ROOT)) and ours["way"].startswith(str(slow))
    assert theirs["ratio"] == 1.0 and ours["rounds"] == 3
    assert ours["baseline_p50_us"] == theirs["p50_us"] < ours["p50_us"]
    assert min(ours["p50_us_rounds"]) >= 30_000  # a sleep is never shorter
    both = zip(ours["p50_us_rounds"], ours["baseline_p50_us_rounds"], strict=True)
    ratios = [mine / its for mine, its in both]
    assert len(ratios) == 3
    assert ours["ratio"] == pytest.approx(statistics.median(ratios), abs=1e-4)
    assert (ours["ratio_low"], ours["ratio_high"]) == (min(ratios), max(ratios))


def test_a_checkout_that_cannot_be_measured(slow, capsys):
    with pytest.raises(_loader.LoadError, match="it has not been built"):
        compare.checkout(str(slow / "fserver"))
    argv = ["compare", "--against", str(slow)]
    for more in (["--rounds", "5"], ["--set", "A=1"]):
        with pytest.raises(SystemExit):
            bench.main([*argv, *more, "pingpong"])
        text = "--against: want no --set, and --rounds 6 or more, for an interval"
        assert text in capsys.readouterr().err

    extension = slow / f"fserver/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.unlink()
    (slow / "setup.py").touch()
    with pytest.raises(_loader.LoadError, match=f"it has not been built .run `make af` in {slow},"):
        bench.main([*argv, "pingpong"])
    assert not capsys.readouterr().out


def test_settings():
    found = compare.settings("STEPAF_QP_NUM=1; STEPAF_QP_NUM=2 STEPMESH_SPLIT_QP_LAG=port1")
    assert [*found] == ["STEPAF_QP_NUM=1", "STEPAF_QP_NUM=2 STEPMESH_SPLIT_QP_LAG=port1"]
    assert [*found.values()][1] == {"STEPAF_QP_NUM": "2", "STEPMESH_SPLIT_QP_LAG": "port1"}
    with pytest.raises(ArgumentTypeError, match="'A': want NAME=VALUE"):
        compare.settings("A")


def row(p50, sent=()):
    figures = {"p50_us": p50, "p99_us": p50, "iters": 5, "sent": sent, "groups": 1}
    return {"transport": "verbs", "op": "push", "bytes_out": 8, "bytes_back": 0, **figures}


def test_shares():
    """Of all rounds; members may have one name."""
    own = [[row(2.0, [["n0 verbs/port2", 1], ["n0 verbs/port2", 2]])] for _ in range(2)]
    own += [[row(2.0, [["n0 verbs/port2", 3], ["n0 verbs/port2", 1]])]]
    [found] = compare._rows("two", own, "one", [[row(1.0)]] * 3)
    assert found["shares"] == "n0 verbs/port2 50 %, n0 verbs/port2 50 %"
    assert found["ratio"] == 2.0 and (found["way"], found["baseline"]) == ("two", "one")


def test_rows_that_are_skipped():
    [found] = compare._rows("", [[{**row(None), "skipped": "no"}]] * 2, "", [[row(1.0)]] * 2)
    assert found["p50_us"] is found["ratio"] is None and found["skipped"] == "no"
    assert compare._rows and list(compare._rows("", [[], []], "", [[], []])) == []


def test_a_round_that_fails_is_named(capfd):
    argv = ["compare", "--rounds", "1", "--set", "A=1; DMLC_INTERFACE=nope0", "pingpong"]
    assert bench.main([*argv, "--transport", "tcp", *SHORT]) == 1
    err = capfd.readouterr().err
    assert "DMLC_INTERFACE=nope0: no such network interface" in err
    assert "bench: DMLC_INTERFACE=nope0: pingpong --transport tcp --sizes 64 " in err
    assert "--no-baseline: status 1" in err


def test_a_round_that_hangs_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(compare, "TIMEOUT", 15.0)
    with pytest.raises(BenchError, match="^A=1: pingpong .*: no end within 15 s"):
        compare.main(["--set", "A=1", "pingpong", *SHORT, "--iters", ENDLESS])
    eventually(lambda: not of_round())


ENDLESS = str(10**9 + os.getpid())  # iterations; no other run of the tests has this number


def of_round():
    """Whether there are processes of a round, which have this in their command."""
    found = subprocess.run(["pgrep", "-f", f" bench pingpong .*{ENDLESS}"])
    return found.returncode == 0


def test_an_interrupt_ends_the_round():
    command = [sys.executable, "-m", "fserver", "bench", "compare", "pingpong", *SHORT]
    command += ["--iters", ENDLESS]
    parent = subprocess.Popen(command, start_new_session=True, preexec_fn=interruptible)
    try:
        eventually(of_round, 60)
        time.sleep(5)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait(30)
        eventually(lambda: not of_round())
    finally:
        parent.kill()
        parent.wait()


LINKS = """
ip link set lo up
for link in 0 1; do
  ip link add a$link type veth peer name b$link
  ip addr add 10.77.$link.1/24 dev a$link
  ip addr add 10.77.$link.2/24 dev b$link
  ip link set a$link up
  ip link set b$link up
done
exec "$@"
"""


PINGPONG = (
    "pingpong --transport tcp --sizes 4K,1M --ops push_pull --iters 5 --rounds 1 --no-baseline"
)
COMPARE = f"{sys.executable} -m fserver bench compare --rounds 2"


def checked(out: Path) -> None:
    """The rows of one interface, then those of both, of which each has carried about half."""
    rows = json.loads(out.read_text())["rows"]
    one, two = (f"DMLC_INTERFACE={names}" for names in ("a0", "a0,a1"))
    sizes = (4096, 1 << 20)
    assert [(r["way"], r["bytes_out"]) for r in rows] == [
        (way, size) for way in (one, two) for size in sizes
    ]
    assert rows[0]["shares"] == "" and rows[0]["ratio"] == 1
    shares = re.fullmatch(r"a0 tcp (\d+) %, a1 tcp (\d+) %", rows[3]["shares"])
    assert all(40 < int(share) < 60 for share in shares.groups())


@pytest.mark.long
def test_two_interfaces(tmp_path: Path) -> None:
    needs("unshare", "ip")
    out = tmp_path / "rows.json"
    command = [*COMPARE.split(), "--set", "DMLC_INTERFACE=a0; DMLC_INTERFACE=a0,a1"]
    command += ["--json", str(out), *PINGPONG.split()]
    alone = ["unshare", "--net", "bash", "-euc", LINKS, "links"]
    ran = subprocess.run([*alone, *command], capture_output=True, text=True, timeout=240)
    print(ran.stdout + ran.stderr)
    assert ran.returncode == 0
    checked(out)
    assert "a0 tcp 50 %, a1 tcp 50 %" in ran.stdout


HOSTS = """
ip link set lo up
unshare --net sleep 300 &
other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
nsenter --net=/proc/$other/ns/net ip link set lo up
for link in 0 1; do
  ip link add a$link type veth peer name b$link netns $other
  ip addr add 10.77.$link.1/24 dev a$link
  nsenter --net=/proc/$other/ns/net ip addr add 10.77.$link.2/24 dev b$link
  ip link set a$link up
  nsenter --net=/proc/$other/ns/net ip link set b$link up
done
at_b="DMLC_INTERFACE=b0; DMLC_INTERFACE=b0,b1"
nsenter --net=/proc/$other/ns/net $COMPARE --set "$at_b" "$@" --role server &
server=$!
$COMPARE --set "DMLC_INTERFACE=a0; DMLC_INTERFACE=a0,a1" --json "$OUT" "$@" --role worker
wait $server
"""


@pytest.mark.long
def test_two_hosts(tmp_path: Path) -> None:
    needs("unshare", "nsenter", "ip")
    out = tmp_path / "rows.json"
    argv = [*PINGPONG.split(), "--scheduler", "10.77.0.2:7000"]
    alone = ["unshare", "--net", "bash", "-euc", HOSTS, "hosts"]
    env = {**os.environ, "OUT": str(out), "COMPARE": COMPARE}
    ran = subprocess.run([*alone, *argv], capture_output=True, text=True, timeout=240, env=env)
    print(ran.stdout + ran.stderr)
    assert ran.returncode == 0
    checked(out)
