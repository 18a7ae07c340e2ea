"""What a source distribution has beside the files of the tree, for setup.py."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import builder
import needs

LINK = re.compile(r"(?<!\w)(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")


def modules() -> set[str]:
    """The Go modules that the engine is built from, on any processor that wheels are built for."""
    text = "-f={{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}"
    found = [
        _go("list", "-deps", text, "./engine/cabi", GOARCH=arch) for arch in ("amd64", "arm64")
    ]
    return set("".join(found).split())


def _go(*arguments: str, **env: str) -> str:
    command = [needs.find_go(), *arguments]
    env = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "1", **env}
    done = subprocess.run(command, cwd=needs.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def complete(tree: Path) -> None:
    """Adds the Go modules that the engine is built from, and the commit, to an unpacked source
    distribution.

    Raises BuildError if the modules cannot be had.
    """
    if commit := builder.commit():
        (tree / "COMMIT").write_text(f"{commit}\n")
    vendor = tree / "vendor"
    if vendor.is_dir():
        return  # this is made from a source distribution
    _go("mod", "vendor", "-o", str(vendor.absolute()))
    # Modules that only tests need are removed. modules.txt, which Go compares with go.mod, keeps
    # naming them.
    needed = modules()
    named = re.findall(r"^# (\S+) v", (vendor / "modules.txt").read_text(), re.MULTILINE)
    for module in set(named) - needed:
        shutil.rmtree(vendor / module, ignore_errors=True)
    for folder in sorted((path for path in vendor.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
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
