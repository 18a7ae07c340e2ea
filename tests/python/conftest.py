"""The fixtures. What they are made of is in a module with a name of its own: there is a conftest
in every folder of tests, and children find functions by the name of their module."""

from forked import fork_server, programs  # noqa: F401
from lanes import driver  # noqa: F401
from nodes import (  # noqa: F401
    _clean_environment,
    child,
    cluster,
    nothing_left,
    pair,
    port,
)
from reports import doctor  # noqa: F401
