"""Tools for the tests of applications: fresh databases, a clock to move, workers to drain, assertions.

With pytest they come as fixtures, without any set-up (see `postbus.testing.plugin`); here are the parts, for
other test runners. They are imported when they are first used: pytest loads this package in every run.

Example:
    >>> def test_order(bus, drain, assert_sent):  # doctest: +SKIP
    ...     place_order(bus)
    ...     assert_sent("emails", payload={"order": 1})
    ...     drain(worker)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postbus.testing._assertions import Assertions
    from postbus.testing._clock import Clock
    from postbus.testing._databases import fresh, server, template, url
    from postbus.testing._drain import Handled, drain, drain_async

__all__ = ["Assertions", "Clock", "Handled", "drain", "drain_async", "fresh", "server", "template", "url"]

_HOMES = {"Assertions": "_assertions", "Clock": "_clock", "Handled": "_drain"}
_HOMES |= {"drain": "_drain", "drain_async": "_drain"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, '_databases')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
