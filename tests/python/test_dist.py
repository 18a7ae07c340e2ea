"""What packages say of themselves. tests/long builds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import builder  # noqa: E402


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", folder, *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    assert builder.commit() == ""
    git(tmp_path, "init", "-q")
    assert builder.commit() == ""  # nothing is committed
    (tmp_path / "file").touch()
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    git(tmp_path, "tag", "-a", "-m", "one", "v1")
    assert builder.commit() == commit
    (tmp_path / "file").write_text("changed")
    assert builder.commit() == f"{commit}-dirty"
    # A source archive that is unpacked there, without the commit and with it.
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.setattr(builder, "ROOT", inside)
    assert builder.commit() == ""
    (inside / "COMMIT").write_text("12ab34c\n")
    assert builder.commit() == "12ab34c"
    monkeypatch.setenv("PATH", str(inside))
    (inside / "COMMIT").unlink()
    assert builder.commit() == ""  # no git
