"""What a source distribution has beside the files of the tree, for setup.py."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import builder
import needs

LINK = re.compile(r"(?<!\w)!?\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def modules() -> set[str]:
    """The Go modules that the engine is built from, on any processor that wheels are built for."""
    of = "-f={{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}"
    return {
        name
        for processor in ("amd64", "arm64")
        for name in _go("list", "-deps", of, "./engine/cabi", GOARCH=processor).split()
    }


def _go(*arguments: str, **more: str) -> str:
    env = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "1", **more}
    command = [needs.find_go(), *arguments]
    done = subprocess.run(command, cwd=needs.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def complete(tree: Path) -> None:
    """Adds the commit, and the Go modules that the engine is built from, to an unpacked source
    distribution."""
    (tree / "COMMIT").write_text(f"{builder.commit()}\n")
    vendor = tree / "vendor"
    if vendor.is_dir():
        return  # this is made from a source distribution
    _go("mod", "vendor", "-o", str(vendor.absolute()))
    # Modules that only tests need are removed. modules.txt, which Go compares with go.mod, keeps
    # naming them.
    named = re.findall(r"^# (\S+) v", (vendor / "modules.txt").read_text(), re.MULTILINE)
    for module in set(named) - modules():
        shutil.rmtree(vendor / module, ignore_errors=True)


def long_description(readme: str) -> str:
    """README.md for a page outside of the tree, where its relative links lead nowhere: their text
    remains, and the path."""

    def text(link: re.Match[str]) -> str:
        words, target = link.groups()
        return words if link[0].startswith("!") or words == target else f"{words} (`{target}`)"

    return LINK.sub(text, readme)
