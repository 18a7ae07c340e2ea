"""What README promises about itself: short, short cells, links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import ROOT

README = (ROOT / "README.md").read_text()
LINES = 130
WORDS = 12


def section(name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README has no section {name!r}"
    return found[1]


def cells(text: str) -> list[list[str]]:
    """The cells of the only table of a section, row by row, without links' targets."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row) for row in rows]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in shown]


def test_length() -> None:
    assert len(README.splitlines()) < LINES


def test_cells_are_short() -> None:
    table = cells(section("What works"))
    assert [cell for row in table for cell in row if len(cell.split()) > WORDS] == []
    assert {len(row) for row in table} == {3}


def test_speed_has_a_column_for_each_library() -> None:
    head, _, *rows = cells(section("Speed"))
    assert [cell.split(":")[0] for cell in head[1:]] == [
        "fserver",
        "NCCL",
        "NVSHMEM",
        "NIXL",
        "floor",
    ]
    assert {len(row) for row in rows} == {len(head)}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_links(target: str) -> None:
    """Links are relative, so that they work in a checkout; the build makes them absolute."""
    assert ":" not in target and not target.startswith("/")
    assert (ROOT / Path(target)).exists()
