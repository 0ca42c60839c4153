"""Finding the PostgreSQL database behind a connection, and refusing those that hold what may be somebody's data."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import parse_qs, unquote

from retrychaos.model.errors import WorldError
from retrychaos.world.postgres import PostgresDatabase
from retrychaos.world.postgres_drivers import LineError
from retrychaos.world.postgres_line import Line
from retrychaos.world.resource import Stage

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))
_HELD = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'm', 'f') AND c.relpersistence <> 't'
    AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_' ORDER BY 1
"""
_WHO = """
SELECT (SELECT system_identifier FROM pg_control_system())::text, (SELECT oid FROM pg_database WHERE datname =
    current_database())::text, current_setting('server_version_num'), pg_is_in_recovery()::text
"""
_OLDEST = 130_000


class Servers:
    """The databases of a check, found when a job first uses a connection to one."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._known: dict[tuple[str, str, str], PostgresDatabase] = {}

    def of(self, raw: Any) -> PostgresDatabase:
        """The database of a connection. Raises WorldError if it must not be touched or cannot be put back."""
        info = raw.info
        place, name, user = _place(info), str(info.dbname), str(info.user)
        database = self._known.get((place, name, user))
        if database is None:
            database = self._known[(place, name, user)] = self._find(raw, place, name)
        return database

    def _find(self, raw: Any, place: str, name: str) -> PostgresDatabase:
        line = Line(raw)
        try:
            return self._adopted(line, place, name)
        except LineError as problem:
            line.hang_up()
            raise WorldError(
                f"the check cannot look into the database {name} on {place} by a connection of its own ({problem}), so "
                "it could not tell what a crash leaves. Let the database role of the job connect once more."
            ) from problem
        except BaseException:
            line.hang_up()
            raise

    def _adopted(self, line: Line, place: str, name: str) -> PostgresDatabase:
        system, oid, version, standby = line.ask(_WHO)[0]
        if int(str(version)) < _OLDEST or standby == "true":
            raise WorldError(
                f"the database {name} on {place} cannot be rewound: it is a standby, or older than PostgreSQL 13. Use "
                "a primary of a newer version for tests."
            )
        identity = f"postgresql:{system}/{oid}"
        known = self._stage.find(identity)
        if isinstance(known, PostgresDatabase):  # the same by another address or role
            line.hang_up()
            return known
        if not declared(self._stage.options("scratch"), place, name):
            self._refuse_data(line, place, name)
        database = PostgresDatabase(self._stage, identity, f"postgresql {place}/{name}", line)
        self._stage.adopt(database)
        return database

    def _refuse_data(self, line: Line, place: str, name: str) -> None:
        held = [str(row[0]) for row in line.ask(_HELD)]
        if not held:
            return
        shown = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
        raise WorldError(
            f"The PostgreSQL database {name} at {place} is not empty (tables: {shown}). A check rewinds it again and "
            "again, so it never touches one that may hold somebody's data; nothing was changed. If this database is "
            f'there for tests, say so: scratch=["{_url(place, name)}"] (without the name of a database: all of that '
            "server). What it holds now is then kept, and put back after every run."
        )


# -- addresses ---------------------------------------------------------------------------------------------------------


def _place(info: Any) -> str:
    host = str(info.host or "localhost")
    return f"{os.path.realpath(host)}:{info.port}" if host.startswith("/") else f"{_host(host)}:{info.port}"


def _host(host: str) -> str:
    return "localhost" if host in _LOCAL else host


def _url(place: str, name: str) -> str:
    host, _, port = place.rpartition(":")
    end = "" if port == "5432" else f":{port}"
    if not host.startswith("/"):
        return f"postgresql://{host}{end}/{name}"
    return f"postgresql:///{name}?host={host}" + (f"&port={port}" if end else "")


def declared(urls: tuple[str, ...], place: str, name: str) -> bool:
    """One of the URLs names that server, and that database or none."""
    return any(_names(url) in ((place, name), (place, "")) for url in urls)


def _names(url: str) -> tuple[str, str]:
    """The server and database that a URL names, without user and password."""
    match = re.fullmatch(
        r"postgres(?:ql)?(?:\+\w+)?://(?:[^@/]*@)?(?P<place>[^/?]*)(?:/(?P<name>[^?]*))?(?:\?(?P<rest>.*))?",
        url.strip(),
    )
    if match is None:
        return "", ""
    options = {name: values[-1] for name, values in parse_qs(match["rest"] or "").items()}
    host, _, port = match["place"].rpartition(":") if re.search(r":\d+$", match["place"]) else (match["place"], "", "")
    host = unquote(host).strip("[]") or options.get("host", "localhost")
    port = port or options.get("port", "5432")
    if host.startswith("/"):
        return f"{os.path.realpath(host)}:{port}", unquote(match["name"] or "")
    return f"{_host(host)}:{port}", unquote(match["name"] or "")
