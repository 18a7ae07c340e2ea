"""What a source distribution has beside the files of the tree, for setup.py."""

import os
import re
import subprocess
from pathlib import Path

import builder
import needs

LINK = re.compile(r"(?<!\w)!?\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def complete(tree: Path) -> None:
    """Adds the commit, and the Go modules that the engine is built from, to an unpacked source
    distribution."""
    (tree / "COMMIT").write_text(f"{builder.commit()}\n")
    command, env = [needs.ROOT / "tools/vendor.sh", tree], {**os.environ, "GO": needs.find_go()}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go mod vendor: {done.stderr.strip()}")


def long_description(readme: str) -> str:
    """README.md for a page outside of the tree, where its relative links lead nowhere: their text
    remains, and the path."""

    def text(link: re.Match[str]) -> str:
        words, target = link.groups()
        return words if link[0].startswith("!") or words == target else f"{words} (`{target}`)"

    return LINK.sub(text, readme)
