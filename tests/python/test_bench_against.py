"""`fserver bench pingpong --against DIR`: its interval, its verdict, whose package it measures."""

import json
import statistics
import sysconfig
from argparse import Namespace
from pathlib import Path

import pytest

from fserver import _loader, bench
from fserver.bench import against

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
    options = Namespace(against=Path("/that"))
    good = [{**row, "ratio_low": low, "ratio_high": 1.5} for low in (0.9, 1.0, 1.03)]
    assert against.judge(options, good) == 0
    assert not capsys.readouterr().err
    assert against.judge(options, [*good, {**row, "ratio_low": 1.031, "ratio_high": 1.5}]) == 1
    assert capsys.readouterr().err == (
        "bench: slower than /that: cma, push, 4096 B out, 0 B back: 1.060 times\n"
    )


def test_each_build_is_measured_by_its_own_package(slow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(against, "HERE", slow)
    path = tmp_path / "rows.json"
    argv = ["pingpong", "--ops", "push_pull", "--sizes", "64", "--rounds", "6", "--iters", "5"]
    argv += ["--transport", "cma", "--json", str(path), "--against", str(ROOT)]
    assert bench.main(argv) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "95 % from" in lines[1] and len(lines) == 3
    assert f"bench: slower than {ROOT}: cma, push_pull, 64 B out, 64 B back: " in err
    got = json.loads(path.read_text())
    assert [row["transport"] for row in got["rows"]] == ["cma"]
    for row in got["rows"]:
        assert row["baseline"].startswith(str(ROOT)) and row["baseline_p50_us"] < row["p50_us"]
        assert min(row["p50_us_rounds"]) >= 30_000  # a sleep is never shorter
        ratios = [
            ours / its
            for ours, its in zip(row["p50_us_rounds"], row["baseline_p50_us_rounds"], strict=True)
        ]
        assert len(ratios) == 6
        assert row["ratio"] == pytest.approx(statistics.median(ratios), abs=1e-4)
        assert (row["ratio_low"], row["ratio_high"]) == pytest.approx(
            (min(ratios), max(ratios)), abs=1e-4
        )


def test_a_checkout_that_cannot_be_measured(slow, capsys):
    with pytest.raises(_loader.LoadError, match="it has not been built"):
        against.checkout(str(slow / "fserver"))
    argv = ["pingpong", "--against", str(slow)]
    with pytest.raises(SystemExit):
        bench.main([*argv, "--rounds", "5"])
    assert "want --rounds 6 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main([*argv, "--beside", "gloo"])
    text = "--against: want --places local, one --device, no --beside, no --shared"
    assert text in capsys.readouterr().err

    extension = slow / f"fserver/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.unlink()
    (slow / "setup.py").touch()
    with pytest.raises(_loader.LoadError, match=f"it has not been built .run `make af` in {slow},"):
        bench.main(argv)
    assert not capsys.readouterr().out
