"""Every block of README.md and of docs/ runs, or says why not. blocks.py has the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import ROOT, Block, files, pages, read, runnable, unused
from runner import missing, run

PAGES = {path: read(path) for path in pages()}
LONG = (
    *("benchmarks", "get-started", "gpu-tensors", "latency", "launchers", "long-contexts"),
    *("lost-peers", "observe", "rails", "stepmesh", "two-hosts"),
)
"""Pages whose blocks start many processes, or measure. README.md has the first steps too."""

BLOCKS = [
    pytest.param(path, block, id=block.name, marks=[pytest.mark.long] if path.stem in LONG else [])
    for path, blocks in PAGES.items()
    for block in runnable(blocks)
]


@pytest.mark.parametrize(("path", "block"), BLOCKS)
def test_block(path: Path, block: Block, tmp_path: Path) -> None:
    if reason := missing(block):
        pytest.skip(f"{block.name}: {reason}")
    run(block, files(PAGES[path], block), tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_named_blocks_are_used(path: Path) -> None:
    """A block that is a file is tested by another one that runs it."""
    assert unused(PAGES[path]) == []


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_make_targets_exist(path: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
    assert named <= known
