"""StepMesh's name for fserver.fserver_lib; importing either gives the same module."""

import sys

from fserver import fserver_lib

sys.modules[__name__] = fserver_lib
