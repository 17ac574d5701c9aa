"""Pipelines on Spark, each one call or one command (`postbus pipeline ...`), with a record of each run.

Example:
    >>> from postbus.pipelines import archive
    >>> archive(["orders"], dsn=dsn, lake="lake").rows  # doctest: +SKIP
    1000
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postbus.pipelines._runs import Recorder, Run

if TYPE_CHECKING:
    from postbus.pipelines._archive import archive
    from postbus.pipelines._mirror import mirror
    from postbus.pipelines._replay import replay
    from postbus.pipelines._report import report

__all__ = ["Recorder", "Run", "archive", "mirror", "replay", "report"]

_WHERE = {"archive": "_archive", "mirror": "_mirror", "replay": "_replay", "report": "_report"}


def __getattr__(name: str) -> Any:
    """Each pipeline is loaded when it is asked for: reports need matplotlib, archives do not."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
