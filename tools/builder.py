"""Builds the engine's archive, the extension and its adapters to torch, for the Makefile and for
setup.py.

    python tools/builder.py engine   build/libfserver.a
    python tools/builder.py ext      the archive, fserver/_C.*.so from it and csrc/, and an adapter;
                                     fserver/include and fserver/lib for programs in C and C++
    python tools/builder.py adapter [--torch DIR] [--out PATH]
                                     one adapter from fserver/_torch/, and print where it is
    python tools/builder.py go       print the Go toolchain that is used

The extension is built for the Python that runs this file. It has no symbol of torch. An adapter
is built for this Python and one minor version of torch: --torch names the folder of a package
torch (with include/, lib/ and version.py), which need not be installed; the default is the torch
of this Python. --out names the file or an existing folder; the default is fserver/_torch/.

What is up to date is not built again: Go decides that for the archive, a dependency file and the
command line for each object, the contents of archive and objects for what is linked.

Environment: CC, CXX and CXXFLAGS as usual, LDFLAGS for the link of the extension, ADAPTER_LDFLAGS
for that of an adapter, MAX_JOBS for the number of compilers at a time;
FSERVER_ARCHIVE, an archive built elsewhere: then Go is not needed;
FSERVER_TORCHES, folders of packages torch, separated by ":": `ext` and setup.py build one adapter
for each, instead of one for the torch of this Python. The first one's pybind11 is used.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from needs import (
    ROOT,
    BuildError,
    adapters,
    compiler,
    find_go,
    need_platform,
    need_torch,
    need_torches,
    prebuilt,
    python_headers,
    torch_in,
)

BUILD = ROOT / "build"
GENERATED = BUILD / "generated"
HEADER = ROOT / "engine/cabi/fserver.h"
FORWARD = ROOT / "cshim/nvml/forward.cc"
SDK = ROOT / "tools/sdk"

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


def _say(text: str) -> None:
    print(f"build: {text}\n", end="", flush=True)  # one write: compilers run side by side


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: exit status {done.returncode}\n{output}")
    if output:
        print(output, end="", flush=True)


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


def archive() -> Path:
    """Builds build/libfserver.a, or takes the one that FSERVER_ARCHIVE names."""
    given = prebuilt()
    if given:
        return given
    path = BUILD / "libfserver.a"
    compiler("CC", "gcc")
    env = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "1"}
    # As the Makefile sets it: Go's cache does not notice that a header of the system has come.
    flag = "-DCS_VERBS_INSTALLED"
    env.setdefault("CGO_CFLAGS", "-O2 -g")
    if os.path.exists("/usr/include/infiniband/verbs.h") and flag not in env["CGO_CFLAGS"]:
        env["CGO_CFLAGS"] += f" {flag}"
    # A source distribution brings the modules. Go's own symbols stay for profilers; debug
    # information would double the file.
    modules = "-mod=vendor" if (ROOT / "vendor").is_dir() else "-mod=readonly"
    flags = [modules, "-trimpath", "-buildvcs=false", "-ldflags=-w"]
    output = ["-buildmode=c-archive", "-o", str(path)]
    _say("go ./engine/cabi")
    _run([find_go(), "build", *flags, *output, "./engine/cabi"], env)
    return path


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
    obj.parent.mkdir(parents=True, exist_ok=True)
    obj.with_suffix(".key").unlink(missing_ok=True)
    _run([*command, "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(name), "-o", str(obj)])
    os.utime(obj, ns=(started, started))  # a source edited meanwhile is younger than its object
    obj.with_suffix(".key").write_text(key)


def _link(made: Path, inputs: list[Path], flags: list[str]) -> None:
    """Links a shared object, unless the same inputs have been linked with the same flags."""
    cxx, version = _cxx()
    contents = [file.read_bytes() for file in inputs]
    key = _digest(json.dumps([*cxx, *flags, version]).encode(), *contents)
    key_file = made.with_suffix(".link")
    if made.is_file() and key_file.is_file() and key_file.read_text() == key:
        return
    _say(f"link {made.name}")
    key_file.unlink(missing_ok=True)
    _run([*cxx, "-o", str(made), *map(str, inputs), *flags])
    key_file.write_text(key)


def _cxx() -> tuple[list[str], str]:
    """The C++ compiler, as words, and what it says of its version."""
    cxx = compiler("CXX", "g++")
    return cxx, _version(tuple(cxx))


@functools.cache
def _version(cxx: tuple[str, ...]) -> str:
    return subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout


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
    _write(path, text)


def _write(path: Path, text: str) -> None:
    """Writes a generated file, unless it is so already."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commit() -> str | None:
    """The commit that this tree is built from, with "-dirty" if something was changed since; None
    in a source archive that does not say."""
    noted = ROOT / "COMMIT"  # in the source distribution
    if noted.is_file():
        return noted.read_text().strip()
    git = ["git", "-C", str(ROOT)]
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True)
        describe = [*git, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
        said = subprocess.run(describe, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    # A source archive may have been unpacked within a repository of something else.
    ours = top.returncode == said.returncode == 0 and Path(top.stdout.strip()) == ROOT
    return said.stdout.strip() if ours else None


def _replace(path: Path, made: Path) -> None:
    """Copies a file in one step, unless it is so already: a process that has mapped the old one
    keeps it."""
    if path.is_file() and filecmp.cmp(made, path, shallow=False):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(made.read_bytes())
    part.chmod(0o755 if ".so" in path.suffixes else 0o644)
    part.replace(path)


def _work() -> Path:
    """Where what is built for this Python is kept."""
    return BUILD / sysconfig.get_config_var("SOABI")


def _key(command: list[str], *more: str) -> str:
    """The headers of Python and of others count by version, not by path or date, so that a build
    in another environment takes the same objects."""
    return _digest(json.dumps([*command, _cxx()[1], sys.version, *more]).encode())


def _units(torch: Path) -> list[tuple[Path, Path, list[str], str]]:
    """What the extension is compiled from: source, object, command and key of each.

    The binding's pybind11 is the copy among torch's headers. No other header of torch can be found.
    """
    shown = _work() / "include"
    shown.mkdir(parents=True, exist_ok=True)
    pybind11 = shown / "pybind11"
    if not (pybind11.is_symlink() and pybind11.resolve() == torch / "include/pybind11"):
        pybind11.unlink(missing_ok=True)
        pybind11.symlink_to(torch / "include/pybind11")
    common = pybind11 / "detail/common.h"
    bound = _digest(common.read_bytes()) if common.is_file() else ""

    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=1", "-Iengine/cabi", "-Icshim/cuda", "-Ifserver/_torch"]
    flags += [f"-I{GENERATED.relative_to(ROOT)}", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    command = [*_cxx()[0], *flags]
    found = [word for path in (shown, python_headers()) for word in ("-isystem", str(path))]
    units = []
    for source in sorted((ROOT / "csrc").glob("*.cc")):
        binds = "#include <pybind11/" in source.read_text()
        key = _key(command, bound if binds else "")
        units.append((source, _work() / f"{source.stem}.o", [*command, *found], key))
    return units


def extension(package: Path) -> Path:
    """Builds the extension and its adapters into a package folder, with the header of the engine,
    which adapters are compiled with."""
    need_platform()
    torches = need_torches()
    made = _work() / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    with _lock():
        _kernels()
        _write(GENERATED / "adapter_id.inc", f"#define FS_ADAPTER {adapters().literal(HEADER)}\n")
        units = _units(torches[0][1])
        with ThreadPoolExecutor(_jobs()) as pool:
            # The objects need no more of the engine than its header, so Go builds beside them.
            engine = pool.submit(archive)
            jobs = [pool.submit(_adapter, *torch) for torch in torches]
            jobs += [pool.submit(_compile, *unit) for unit in units]
            try:
                done = [job.result() for job in jobs]
                library = engine.result()
            except BuildError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        exports = _work() / "exports.map"
        _write(exports, EXPORTS)
        flags = [*LINK_FLAGS, f"-Wl,--version-script={exports}"]
        flags += ["-lresolv", "-lpthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
        _link(made, [*(unit[1] for unit in units), library], flags)

        _replace(package / made.name, made)
        for adapter in filter(None, done):
            _replace(package / "_torch" / adapter.name, adapter)
        _replace(package / "include/fserver.h", HEADER)
        _write(package / "_commit", f"{commit() or 'unknown'}\n")
    return package / made.name


def _adapter(version: str, torch: Path) -> Path:
    """Builds the adapter for one torch, if it is not up to date."""
    work = BUILD / f"{sysconfig.get_config_var('SOABI')}-torch-{version}"
    made = work / adapters().file_name(version)
    given = [*_cxx()[0], "-Wall", "-Wextra", *adapters().compile_flags(HEADER)]
    given += shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*given, *adapters().includes(torch, python_headers())]
    _compile(adapters().SOURCE, work / "adapter.o", command, _key(given, version))
    flags = [*adapters().link_flags(torch), *shlex.split(os.environ.get("ADAPTER_LDFLAGS", ""))]
    _link(made, [work / "adapter.o"], flags)
    return made


# For programs in C and C++


def sdk(package: Path) -> None:
    """Builds into a package folder what programs in C and C++ need: include/ and lib/, with the
    archive, the shared library, and files for CMake and pkg-config."""
    with _lock():
        _headers(package / "include")
        header = HEADER.read_text()
        abi = re.findall(r"^#define FS_ABI (\d+)$", header, re.MULTILINE)[0]
        for made in _libraries(header, abi, prebuilt() or BUILD / "libfserver.a"):
            _replace(package / "lib" / made.name, made)
        init = (ROOT / "fserver/__init__.py").read_text()
        version = re.findall(r'^__version__ = "(.+?)"', init, re.MULTILINE)[0]
        for source in SDK.iterdir():
            folder = "cmake/fserver" if source.suffix == ".cmake" else "pkgconfig"
            text = source.read_text().replace("@ABI@", abi).replace("@VERSION@", version)
            _write(package / "lib" / folder / source.name, text)


def _headers(to: Path) -> None:
    """Copies the headers, and removes those that are gone."""
    headers = {
        path.relative_to(ROOT / "include"): path for path in (ROOT / "include").rglob("*.h*")
    }
    headers[Path(HEADER.name)] = HEADER
    for name, path in headers.items():
        _replace(to / name, path)
    for path in to.rglob("*.h*"):
        if path.relative_to(to) not in headers:
            path.unlink()


def _libraries(header: str, abi: str, archive: Path) -> list[Path]:
    """The archive, the shared library, and a stub of that for the linker.

    A wheel can hold no symbolic link. So programs are linked with libfserver.so, which has the
    names of the functions alone, and load the library by its soname.
    """
    name = f"libfserver.so.{abi}"
    exports, stub = BUILD / "fserver.map", BUILD / "stub.cc"
    _write(exports, f"FSERVER_{abi} {{ global: fs_*; local: *; }};\n")
    functions = sorted(set(re.findall(r"\b(fs_\w+)\(", re.sub("//.*", "", header))))
    bodies = "".join(f"void {function}() {{}}\n" for function in functions)
    _write(stub, f'extern "C" {{\n{bodies}}}\n')
    undefined = subprocess.run(["nm", "-u", archive], capture_output=True, text=True).stdout
    forwarded = sorted(set(re.findall(r"\bnvml\w+", undefined)))
    _write(GENERATED / "forwarded.inc", "".join(f"FORWARD({f})\n" for f in forwarded))

    stub_object, forward = BUILD / "stub.o", BUILD / "forward.o"
    command = [*_cxx()[0], "-O2", "-fPIC", f'-DFORWARDED="{GENERATED}/forwarded.inc"']
    for source, obj in ((stub, stub_object), (FORWARD, forward)):
        _compile(source, obj, command, _key(command))
    flags = [flag for flag in LINK_FLAGS if "exclude-libs" not in flag]
    flags += [f"-Wl,--version-script={exports}", f"-Wl,-soname,{name}", "-Wl,-z,defs"]
    flags += ["-lresolv", "-lpthread", "-ldl", *shlex.split(os.environ.get("LDFLAGS", ""))]
    _link(BUILD / "libfserver.so", [stub_object], flags)
    # The linker is told to take the functions of the archive: nothing names them.
    named = [f"-Wl,-u,{function}" for function in functions]
    _link(BUILD / name, [forward, archive], [*named, *flags])
    return [_whole(archive, forward), BUILD / name, BUILD / "libfserver.so"]


def _whole(archive: Path, more: Path) -> Path:
    """A copy of an archive with one more object."""
    made = BUILD / "sdk/libfserver.a"
    key_file, key = made.with_suffix(".key"), _digest(archive.read_bytes(), more.read_bytes())
    if not (made.is_file() and key_file.is_file() and key_file.read_text() == key):
        _replace(made, archive)
        _run(["ar", "r", str(made), str(more)])
        key_file.write_text(key)
    return made


def adapter(torch: str | None, out: str | None) -> Path:
    """Builds one adapter to a file or into a folder; see above."""
    version, home = torch_in(torch, "--torch") if torch else need_torch()
    path = Path(out).resolve() if out else ROOT / "fserver/_torch"
    with _lock():
        made = _adapter(version, home)
        if path.is_dir():
            path /= made.name
        _replace(path, made)
    return path


def main(arguments: Sequence[str]) -> int:
    what = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = what.add_subparsers(dest="command", required=True)
    for name in ("engine", "ext", "go"):
        commands.add_parser(name)
    one = commands.add_parser("adapter")
    one.add_argument("--torch", metavar="DIR")
    one.add_argument("--out", metavar="PATH")
    options = what.parse_args(arguments)
    try:
        if options.command == "engine":
            with _lock():
                _say(f"{os.path.relpath(archive(), ROOT)} is ready")
        elif options.command == "ext":
            _say(f"{extension(ROOT / 'fserver').relative_to(ROOT)} is ready")
            sdk(ROOT / "fserver")
        elif options.command == "adapter":
            print(adapter(options.torch, options.out))
        else:
            print(find_go())
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
