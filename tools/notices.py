"""Writes NOTICES: the licence texts of all that is linked into the package.

    python tools/notices.py            write it
    python tools/notices.py --check    say whether it is up to date, for tools/lint.sh

The Go modules are those that the engine imports, on any processor that wheels are built for.
Their texts come from the module cache, Go's own from its toolchain. The texts of what C++ brings
are in tools/licences.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import needs
from needs import ROOT

TEXTS = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|PATENTS)(\..*)?", re.IGNORECASE)
RULE = "=" * 80
HEAD = """\
Notices of software that is part of fserver's built packages. tools/notices.py makes this file.

Linked into the extension: the Go modules and the Go runtime below, pybind11 (header only), and, in
wheels, the GNU C++ library. Nothing is said here about the licence of fserver itself.
"""


def go(*arguments: str, **env: str) -> str:
    """What Go prints. Raises BuildError if it fails."""
    command = [needs.find_go(), *arguments]
    env = {**os.environ, "GOTOOLCHAIN": "local", **env}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise needs.BuildError(f"go {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def modules() -> dict[str, Path]:
    """The modules that are linked, with their versions, and where their sources are."""
    text = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}{{end}}{{end}}"
    lines = set()
    for processor in ("amd64", "arm64"):
        found = go(
            "list", "-deps", f"-f={text}", "./engine/cabi", GOARCH=processor, CGO_ENABLED="1"
        )
        lines |= set(filter(None, found.splitlines()))
    return {name: Path(folder) for name, folder in sorted(line.split("\t") for line in lines)}


def main(arguments: list[str]) -> None:
    parts = [HEAD]

    def add(title: str, path: Path) -> None:
        parts.append(f"{RULE}\n{title}\n{RULE}\n\n{path.read_text().strip()}\n")

    runtime = {"The Go runtime and standard library": Path(go("env", "GOROOT"))}
    for title, folder in {**modules(), **runtime}.items():
        files = sorted(path for path in folder.iterdir() if TEXTS.fullmatch(path.name))
        if not files:
            raise needs.BuildError(f"{title}: no licence file in {folder}")
        for path in files:
            add(f"{title}: {path.name}", path)
    for path in sorted(ROOT.glob("tools/licences/*.txt")):
        add(path.stem, path)
    if arguments != ["--check"]:
        (ROOT / "NOTICES").write_text("\n".join(parts))
    elif (ROOT / "NOTICES").read_text() != "\n".join(parts):
        raise needs.BuildError("NOTICES is not up to date: run tools/notices.py")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except needs.BuildError as error:
        sys.exit(f"notices: {error}")
