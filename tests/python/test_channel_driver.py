"""Stream channels and the CUDA driver: its library, NVRTC, and drivers that lack functions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from channels import COMPILER, needs_compiler
from forked import Forks
from nodes import LIMIT

import fserver
from fserver import _loader
from fserver.channel import nvrtc


@pytest.mark.parametrize("own", ["12.9", "13.2", "14.0"])
def test_compiler_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str) -> None:
    """That of the CUDA which torch was built with comes before all others, wherever they are."""
    major = own.partition(".")[0]
    for place in ("cu12/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu14/lib/libnvrtc.so.14"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", own)
    majors = [path.rpartition(".")[2] for path in nvrtc._candidates()]
    assert majors[:2] == [major] * 2
    assert major not in majors[2:]
    assert {"12", "13"} <= set(majors)


def test_kernels_compile() -> None:
    """NVRTC needs no GPU."""
    source = _loader.load().lane_source()
    try:
        nvrtc._library()
    except fserver.ConfigError as error:
        pytest.skip(str(error))
    for arch in (80, 90):
        assert nvrtc.image(source, arch)[:4] == b"\x7fELF"
    with pytest.raises(fserver.ConfigError, match="compute capability"):
        nvrtc.image(source, 60)


def test_no_driver() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(fserver.ConfigError, match="cannot use a GPU: .*install an NVIDIA driver"):
        _loader.load().Lane(0, b"", 1000.0, True)
    text = r"^map_pinned_tensor: cannot use a GPU: .*libcuda.so.1.*\(install an NVIDIA driver"
    with pytest.raises(fserver.ConfigError, match=text):
        fserver.map_pinned_tensor(torch.zeros(1), 0)
    word = torch.zeros(1, dtype=torch.int64)
    text = r"^wait_flag: flag is on the CPU but not pinned: pass flag.pin_memory\(\)"
    with pytest.raises(fserver.ConfigError, match=text):
        fserver.wait_flag(word, word)


OverDriver = Callable[[str, str], list[str]]


@pytest.fixture(scope="module")
def over_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverDriver]:
    """Gives what a program says over a CUDA driver of such a source, by line."""
    folder = tmp_path_factory.mktemp("driver")
    forks = Forks(LD_LIBRARY_PATH=str(folder))
    forks.run("-c", "", limit=int(LIMIT))  # torch looks for a driver when it is imported
    library = folder / "libcuda.so.1"

    def said(source: str, program: str) -> list[str]:
        library.unlink(missing_ok=True)
        command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
        subprocess.run(command, input=source.encode(), check=True)
        done = forks.run("-c", program, limit=int(LIMIT))
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    yield said
    forks.close()


OLD_DRIVER = """
import fserver
from fserver import _loader

for call in (
    lambda: _loader.load().Lane(0, b"", 1000.0, True),
    lambda: fserver.Worker(scheduler="127.0.0.1:9", backend="GPU", gpu=0),
):
    try:
        call()
    except fserver.ConfigError as error:
        print(error)
"""


# One that says what it has by version (since 11.3), and has not what is called LACKS.
DRIVER_OF = """
#include <string.h>

static int good(void) { return 0; }
static int version(int *out) { return *out = VERSION, 0; }

int LOOKUP(const char *name, void **function, int since) {
  *function = since > VERSION || strcmp(name, LACKS) == 0  ? 0
              : strcmp(name, "cuDriverGetVersion") == 0 ? (void *)version
                                                        : (void *)good;
  return *function ? 0 : 500;
}
"""


def driver_of(version: int, lacks: str = "") -> str:
    lookup = "cuGetProcAddress" if version < 12000 else "cuGetProcAddress_v2"
    names = {"VERSION": version, "LACKS": f'"{lacks}"', "LOOKUP": lookup}
    return "".join(f"#define {k} {v}\n" for k, v in names.items()) + DRIVER_OF


@needs_compiler
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("int none;", "libcuda.so.1 has no function cuGetProcAddress, which CUDA 11.3 added"),
        (
            driver_of(12040, "cuMemAlloc"),
            "no function cuMemAlloc, which CUDA 3.2 added; this driver supports CUDA 12.4",
        ),
        *(
            (
                driver_of(v),
                f"this driver supports CUDA {v // 1000}.{v // 10 % 100}, want 11.7 or later",
            )
            for v in (10010, 11030, 11040, 11060)
        ),
    ],
    ids=["none", "12.4 without", "10.1", "11.3", "11.4", "11.6"],
)
def test_driver_without_what_is_needed(over_driver: OverDriver, source: str, says: str) -> None:
    """Channels and nodes say what it lacks, since when drivers have it, what it is, and what to
    do."""
    said = over_driver(source, OLD_DRIVER)
    assert len(said) == 2, said
    for text in said:
        remedy = r" \(install an NVIDIA driver for CUDA 11.7 or later, or (use|set) "
        assert re.search(re.escape(says) + remedy, text), text
        assert text.count("install") == 1, text  # what to do, once


COUNTED_CONTEXTS = """
#include <stdlib.h>
#include <string.h>

int contexts;

static int good(void) { return 0; }
static int version(int *out) { return *out = 13000, 0; }
static int one(int *gpus) { return *gpus = 1, 0; }
static int made(void) { return contexts++, 0; }
static int host(void **p, size_t n) { return !(*p = calloc(1, n)); }

int cuGetProcAddress_v2(const char *name, void **function) {
  *function = strcmp(name, "cuDriverGetVersion") == 0         ? (void *)version
              : strcmp(name, "cuDeviceGetCount") == 0         ? (void *)one
              : strcmp(name, "cuDevicePrimaryCtxRetain") == 0 ? (void *)made
              : strncmp(name, "cuCtxCreate", 11) == 0         ? (void *)made
              : strcmp(name, "cuMemHostAlloc") == 0           ? (void *)host
                                                              : (void *)good;
  return 0;
}
"""

ON_THE_CPU = """
import channels, ctypes, torch, nodes
from fserver import _loader

driver = ctypes.CDLL("libcuda.so.1")
count = lambda: ctypes.c_int.in_dll(driver, "contexts").value

for way in channels.WAYS:
    pair = nodes.open_cluster(transport=way)
    x, y = torch.ones(1 << 20), torch.empty(1 << 20)
    h = pair.worker.push_pull([x], [0], [y], [0])
    [(handler, tensors, _)] = pair.server.get_batch()
    pair.server.respond(tensors, handler)
    pair.worker.wait(h)
    assert torch.equal(x, y)
    nodes.together([node.stop for node in pair.nodes])
print("exchanged", count())
_loader.load().Lane(0, b"", 1000.0, True).close()
print("a channel of a GPU", count())
"""


@needs_compiler
def test_no_context_on_the_cpu(over_driver: OverDriver) -> None:
    """Nodes of backend CPU make none on a host that has GPUs."""
    said = over_driver(COUNTED_CONTEXTS, ON_THE_CPU)
    assert said == ["exchanged 0", "a channel of a GPU 1"]
