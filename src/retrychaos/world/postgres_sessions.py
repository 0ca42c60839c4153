"""Makes a connection as new for the next delivery, where that is certain to work: connecting again takes 2 to 5 ms.

Only connections that an engine opened during the check are kept: what its listeners have set on them is known then. If
one holds more than settings after that (temporary tables, a role, prepared statements, locks), or if anything else than
the server's side of it has changed, it is closed like any other.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from retrychaos.world.postgres_catalog import literal
from retrychaos.world.postgres_drivers import LineError, run, standing
from retrychaos.world.postgres_wire import FAILED, IDLE, IN_TRANSACTION, Text

_SETTINGS = "SELECT name, current_setting(name) FROM pg_settings WHERE source = 'session' ORDER BY name"
_EXTRAS = """
SELECT (pg_my_temp_schema() <> 0 OR current_user <> session_user OR EXISTS (SELECT FROM pg_listening_channels())
    OR EXISTS (SELECT FROM pg_prepared_statements) OR EXISTS (SELECT FROM pg_cursors)
    OR EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()))::text
"""
_FACES = (
    *("autocommit", "isolation_level", "read_only", "readonly", "deferrable", "encoding", "prepare_threshold"),
    *("row_factory", "cursor_factory", "server_cursor_factory"),
)


@dataclass(frozen=True, eq=False)
class _Session:
    """A connection as it was when its engine had opened it."""

    raw: Any
    record: Any
    settings: tuple[Text, ...]
    face: tuple[Any, ...]
    info: dict[Any, Any]


class Sessions:
    """The connections of a check that may be used by several deliveries."""

    def __init__(self) -> None:
        self._known: dict[int, _Session] = {}

    def met(self, raw: Any, record: Any) -> None:
        """A connection that its engine has just opened leaves the pool for the first time."""
        if id(raw) in self._known or record is None or standing(raw) != IDLE:
            return
        with contextlib.suppress(LineError):
            if _apart(raw, _EXTRAS)[0][0] == "false":
                session = _Session(raw, record, tuple(_apart(raw, _SETTINGS)), _face(raw), dict(record.info))
                self._known[id(raw)] = session

    def renew(self, raw: Any) -> bool:
        """The process that used it is gone: make it as new. False if it must be closed."""
        session = self._known.get(id(raw))
        if session is None:
            return False
        try:
            good = self._renewed(session)
        except Exception:  # closed by the job, or by the server
            good = False
        if not good:
            del self._known[id(raw)]
        return good

    def _renewed(self, session: _Session) -> bool:
        raw, record = session.raw, session.record
        if standing(raw) in (IN_TRANSACTION, FAILED):
            raw.rollback()
        if standing(raw) != IDLE or record.fairy_ref is not None or record.dbapi_connection is not raw:
            return False  # somebody holds it, or it is not in its pool any more
        if _face(raw) != session.face or record.info != session.info:
            return False
        _apart(raw, "DISCARD ALL")
        prepared = getattr(raw, "_prepared", None)
        if prepared is not None:
            prepared._names.clear()
            prepared._counts.clear()
        if session.settings:
            values = (f"set_config({literal(name)}, {literal(value)}, false)" for name, value in session.settings)
            _apart(raw, f"SELECT {', '.join(values)}")
        return _face(raw) == session.face

    def close(self) -> None:
        """The check is over: its connections are not those that the user's engines would have opened."""
        for session in self._known.values():
            with contextlib.suppress(Exception):
                session.record.invalidate()
            with contextlib.suppress(Exception):
                session.raw.close()
        self._known.clear()


def _apart(raw: Any, sql: str) -> list[Text]:
    """Run what may not be part of a transaction; psycopg2 would begin one."""
    if hasattr(raw, "pgconn"):
        return run(raw, sql)
    before, raw.autocommit = raw.autocommit, True
    try:
        return run(raw, sql)
    finally:
        raw.autocommit = before


def _face(raw: Any) -> tuple[Any, ...]:
    """What the driver keeps for a connection."""
    return tuple([getattr(raw, name, None) for name in _FACES])
