"""A connection in the pool of an async engine: when its delivery is over, no event loop is there to close it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class AsyncRecord:
    """SQLAlchemy's record of such a connection. close: ends what is below, if nobody else does."""

    def __init__(self, record: Any, close: Callable[[Any], None] | None = None) -> None:
        self._record = record
        self._close = close

    def invalidate(self) -> None:
        if self._close is not None:
            self._close(self._record.dbapi_connection)
        self._record.dbapi_connection = None


def dies_in_silence(record: Any, fairy: Any) -> None:
    """Who has got that connection from a pool may die with it. Else SQLAlchemy says that it was not given back."""
    record.fairy_ref = weakref.ref(fairy)  # up to SQLAlchemy 2.0 this one calls something back
    if hasattr(fairy, "_finalizer"):
        fairy._finalizer.detach()
