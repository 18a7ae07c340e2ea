"""What a source distribution has beside the files of the tree, for setup.py."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import builder
import needs

LINK = re.compile(r"(?<!\w)(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")


def complete(tree: Path) -> None:
    """Adds the Go modules that the engine is built from, and the commit, to an unpacked source
    distribution.

    Raises BuildError if the modules cannot be had.
    """
    commit = builder.commit()
    if commit:
        (tree / "COMMIT").write_text(f"{commit}\n")
    vendor = tree / "vendor"
    if vendor.is_dir():
        return  # this is made from a source distribution
    command = [needs.find_go(), "mod", "vendor", "-o", str(vendor.absolute())]
    done = subprocess.run(command, cwd=builder.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go mod vendor: {done.stderr.strip()}")
    _prune(vendor)


def _prune(vendor: Path) -> None:
    """Removes the modules that only tests need. modules.txt, which Go compares with go.mod, keeps
    naming them."""
    import notices

    needed = {name.split()[0] for name in notices.modules()}
    named = re.findall(r"^# (\S+) v", (vendor / "modules.txt").read_text(), re.MULTILINE)
    for module in set(named) - needed:
        shutil.rmtree(vendor / module, ignore_errors=True)
    for folder, _, _ in os.walk(vendor, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # those that are empty now
    if missing := [module for module in sorted(needed) if not (vendor / module).is_dir()]:
        raise needs.BuildError(f"go mod vendor: no {', '.join(missing)}")


def long_description(root: Path) -> str:
    """README.md for a page outside of the tree, where its relative links lead nowhere.

    They are made absolute if pyproject.toml names the address of the sources
    (`[project.urls]`, `Source`); else their text remains, and the path.
    """
    pyproject = (root / "pyproject.toml").read_text()
    urls = re.search(r'^Source = "(\S+)"$', pyproject, re.MULTILINE)

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if urls:
            kind = "raw" if image else "blob"
            return f"{image}[{text}]({urls[1].rstrip('/')}/{kind}/HEAD/{target})"
        return text if image or text == target else f"{text} (`{target}`)"

    return LINK.sub(absolute, (root / "README.md").read_text())
