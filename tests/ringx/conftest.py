"""The processes of the tests of ringx."""

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes, for the whole session."""
    made = World(tmp_path_factory.mktemp("ringx"))
    yield made
    made.close()
