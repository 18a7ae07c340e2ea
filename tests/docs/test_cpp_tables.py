"""The tables of calls of ps-lite and StepMesh name each public name of include/ps, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT
from headers import public_names

TABLES = {"docs/ps-lite.md": "## Calls", "docs/cpp.md": "## Programs of StepMesh"}
HEADERS = [*sorted(ROOT.glob("include/ps/**/*.h")), ROOT / "include/dmlc/logging.h"]
# Public for other headers alone.
OURS = re.compile(
    r"FSERVER_\w+|DMLC_LOGGING_H_|LogMessage|LogMessageFatal|stream|CheckFinalize|letters|worker|server|set"
)


def rows() -> Iterator[tuple[str, str]]:
    """The calls of a row, and what it says about them."""
    for page, title in TABLES.items():
        section = (ROOT / page).read_text().split(f"\n{title}\n")[1].split("\n## ")[0]
        for row in re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE):
            if "`" in row[0]:
                yield row


def names_of(calls: str) -> set[str]:
    """The names in code: `Van::Send` is Van and Send; a path is none."""
    codes = [code for code in re.findall(r"`([^`]+)`", calls) if "/" not in code]
    return {name for code in codes for name in code.split("(")[0].split("::")}


def test_the_reader_of_headers() -> None:
    """It finds what is hard to find, and nothing that is private."""
    found = set.union(*map(public_names, HEADERS))
    assert found >= {"PS_VLOG", "SArray", "FindRange", "kMaxKey", "JOINT", "KVPairs", "Slicer"}
    assert found >= {"set_request_handle", "AF_FLAG_BATCH_END", "my_node", "RegisterRecvBuffer"}
    assert not found & {"slice", "opened", "at_once", "size_", "keys", "Kept", "override"}


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_each_public_name_has_a_row(header: Path) -> None:
    named = set.union(*(names_of(calls) | names_of(text) for calls, text in rows()))
    missing = {name for name in public_names(header) - named if not OURS.fullmatch(name)}
    assert not missing


def test_rows_name_what_is_there() -> None:
    there = set.union(*map(public_names, HEADERS))
    for calls, text in rows():
        if not text.startswith("absent"):
            assert names_of(calls) <= there, calls
