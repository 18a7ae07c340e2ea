"""What the engine logs without being asked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from nodes import Cluster


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_each_connection_is_one_line(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture[str], transport: str
) -> None:
    capfd.readouterr()
    made = cluster(2, 2, transport=transport, settings={})
    made.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if " is connected" in line]
    pairs = sorted(
        re.findall(r"((?:worker|server) \d)\t((?:worker|server) \d) is connected", "\n".join(lines))
    )
    workers, servers = ["worker 0", "worker 1"], ["server 0", "server 1"]
    assert pairs == sorted(
        [(w, s) for w in workers for s in servers] + [(s, w) for w in workers for s in servers]
    )
    assert all("\tINFO\t" in line for line in lines)
    if transport == "tcp":
        assert all(
            '"transport": "tcp", "why": "cma: FSERVER_TRANSPORT=tcp at ' in line for line in lines
        )


def test_a_level_that_was_asked_for(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture[str]
) -> None:
    for settings in ({"FSERVER_LOG": "warn"}, {"PS_VERBOSE": "0"}):
        cluster(settings=settings).close()
        assert "\tINFO\t" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("asked", "level"),
    [({}, "warn"), ({"FSERVER_LOG": "info"}, "info"), ({"PS_VERBOSE": "1"}, None)],
)
def test_benchmarks_log_what_they_are_asked_to(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], level: str | None
) -> None:
    """A table is not to be lost among lines of connections."""
    from fserver import bench
    from fserver.bench import pingpong

    seen: list[str | None] = []
    for name in ("FSERVER_LOG", "PS_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    monkeypatch.setattr(pingpong, "main", lambda _: seen.append(os.environ.get("FSERVER_LOG")) or 0)
    assert bench.main(["pingpong"]) == 0
    assert seen == [level]
    assert dict(os.environ) == before
