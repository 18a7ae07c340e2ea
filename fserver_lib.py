"""StepMesh's name for fserver.fserver_lib; importing either gives the same module."""

import sys

from fserver import fserver_lib
from fserver.fserver_lib import *  # noqa: F403 (what type checkers see)

sys.modules[__name__] = fserver_lib
