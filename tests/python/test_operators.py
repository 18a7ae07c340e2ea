"""torch.ops.fserver: there as soon as fserver and torch have been imported, in whatever order."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

USE = """
import sys
for name in ("send", "recv"):
    try:
        getattr(torch.ops.fserver, name)(7, [], torch.zeros(1, dtype=torch.int64))
    except fserver.ClosedError as error:
        assert "no open channel has number 7: it is closed" in str(error), error
    else:
        raise AssertionError(name)
assert "fserver._C" not in sys.modules
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import torch, fserver", marks=pytest.mark.long),
        pytest.param("import fserver, torch", marks=pytest.mark.long),
        pytest.param("import fserver_lib, torch, fserver", marks=pytest.mark.long),
        pytest.param("import fserver; from torch import nn; import torch", marks=pytest.mark.long),
        pytest.param(
            "import fserver, importlib.util; importlib.util.find_spec('torch').loader\n"
            "import torch",
            marks=pytest.mark.long,
        ),
        "import fserver; from fserver.channel import Channel; import torch",
    ],
)
def test_operators_before_any_channel(imports: str) -> None:
    """And the engine is not loaded for them, so that the process can be forked."""
    run(f"{imports}\n{USE}")


def test_operators_in_both_sides_of_a_fork() -> None:
    fork = "import fserver, os, torch\npid = os.fork()\n"
    run(f"{fork}{USE}if pid: assert os.waitpid(pid, 0)[1] == 0\n")


ABSENT = """
import sys
import fserver
class Without:
    def __init__(self, missing):
        self.missing = missing
    def find_spec(self, name, path, target=None):
        if name == self.missing:
            raise ModuleNotFoundError("not here", name=name)
def refused(missing):
    sys.meta_path.insert(0, Without(missing))
    try:
        import torch
    except ModuleNotFoundError as error:
        assert (str(error), error.name) == ("not here", missing)
    else:
        raise AssertionError(missing)
    del sys.meta_path[0]
"""


def test_torch_that_is_not_found_at_first() -> None:
    """Its error is as ever, a later import has the operators, and nothing stays behind."""
    run(f"""{ABSENT}
before = list(sys.meta_path)
refused("torch")
import torch
assert sys.meta_path == before[1:]
assert "exec_module" not in vars(torch.__spec__.loader)
{USE}""")


def test_torch_that_fails_half_way() -> None:
    run(f"{ABSENT}\nrefused('torch._utils')\nassert 'torch' not in sys.modules")


def test_a_program_without_torch_stays_without() -> None:
    run("import fserver, sys\nassert 'torch' not in sys.modules")
