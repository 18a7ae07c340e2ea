"""Writes NOTICES: the licence texts of all that is linked into the package.

    python tools/notices.py            write it
    python tools/notices.py --check    say whether it is up to date, for tools/lint.sh

The Go modules are those that the engine imports, on any processor that wheels are built for.
Their texts come from the module cache, Go's own from its toolchain. The texts of what C++ brings
are in tools/licences.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import needs

ROOT = needs.ROOT
NOTICES = ROOT / "NOTICES"
PROCESSORS = ("amd64", "arm64")
TEXTS = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|PATENTS)(\..*)?", re.IGNORECASE)
RULE = "=" * 80

HEAD = """\
Notices of software that is part of fserver's built packages. tools/notices.py makes this file.

Linked into the extension: the Go modules and the Go runtime below, pybind11 (header only), and, in
wheels, the GNU C++ library. Nothing is said here about the licence of fserver itself.
"""


def packages(processor: str) -> list[dict]:
    """What `go list` says of each package that the engine is linked from."""
    env = {**os.environ, "GOTOOLCHAIN": "local", "GOARCH": processor, "CGO_ENABLED": "1"}
    command = [needs.find_go(), "list", "-deps", "-json=ImportPath,Module", "./engine/cabi"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go list: {done.stderr.strip()}")
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        package, end = decoder.raw_decode(text)
        found.append(package)
        text = text[end:].lstrip()
    return found


def modules() -> dict[str, Path]:
    """The modules that are linked, with their versions, and where their sources are."""
    found = {}
    for processor in PROCESSORS:
        for package in packages(processor):
            module = package.get("Module")
            if module and not module.get("Main"):
                found[f"{module['Path']} {module['Version']}"] = Path(module["Dir"])
    return dict(sorted(found.items()))


def texts(title: str, folder: Path) -> Iterator[str]:
    """The licence files of a folder.

    Raises BuildError if there is none.
    """
    files = sorted(path for path in folder.iterdir() if TEXTS.fullmatch(path.name))
    if not files:
        raise needs.BuildError(f"{title}: no licence file in {folder}")
    for path in files:
        yield f"{RULE}\n{title}: {path.name}\n{RULE}\n\n{path.read_text().strip()}\n"


def notices() -> str:
    """The contents of NOTICES."""
    parts = [HEAD]
    for title, folder in modules().items():
        parts += texts(title, folder)
    command = [needs.find_go(), "env", "GOROOT"]
    root = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    parts += texts("The Go runtime and standard library", Path(root))
    for path in sorted((ROOT / "tools/licences").glob("*.txt")):
        parts.append(f"{RULE}\n{path.stem}\n{RULE}\n\n{path.read_text().strip()}\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    try:
        text = notices()
    except needs.BuildError as error:
        print(f"notices: {error}", file=sys.stderr)
        return 1
    if arguments == ["--check"]:
        if NOTICES.read_text() != text:
            print("notices: NOTICES is not up to date: run tools/notices.py", file=sys.stderr)
            return 1
    else:
        NOTICES.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
