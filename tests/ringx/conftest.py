"""The processes of the tests of ringx."""

from collections.abc import Iterator

import pytest
from world import World

from fserver.bench import processes

# Each takes as long as torch does, and all ranks use them.
processes.PRELOAD += ["torch._dynamo", "transformers.models.llama.modeling_llama"]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes, for the whole session."""
    made = World(tmp_path_factory.mktemp("ringx"))
    yield made
    made.close()
