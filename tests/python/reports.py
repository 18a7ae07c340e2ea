"""What the tests of `fserver doctor` read of its report."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fserver import cli

Doctor = Callable[..., tuple[int, dict]]
"""Runs the doctor with --json and further options. Returns its exit status and its report."""


def states(found: dict, section: str) -> dict[str, str]:
    return {check["name"]: check["state"] for check in found["sections"][section]}


def line(found: dict, section: str, name: str) -> dict:
    return next(check for check in found["sections"][section] if check["name"] == name)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Checks what holds for every report too."""

    def run(*args: str) -> tuple[int, dict]:
        status = cli.main(["doctor", "--json", *args])
        found = json.loads(capsys.readouterr().out)
        assert found["status"] == status
        for checks in found["sections"].values():
            for check in checks:
                assert check["state"] in ("yes", "no", "note", "info")
                assert check["remedy"] or check["state"] != "no", check
        return status, found

    return run
