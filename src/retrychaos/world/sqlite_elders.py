"""SQLite connections that are older than the check: finding them, and remembering which of them jobs use."""

from __future__ import annotations

import gc
import sqlite3
import sys
import types
from typing import Any

from retrychaos.model.errors import LateError
from retrychaos.world.sqlite_seen import SeenConnection
from retrychaos.world.sqlite_turns import TurnConnection

LATE = "the job uses a connection from before the check"
_floor = -1
"""How many references to the class there are for ever, as far as we know: with no more, it has no instances."""
_DESCRIPTORS = (
    *(types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.WrapperDescriptorType),
)


class Elders:
    """Connections from before the check that jobs have been seen to use. They stay known for the checks of one test."""

    def __init__(self) -> None:
        self.used: list[sqlite3.Connection] = []

    def came(self, problem: LateError) -> bool:
        """That is why the check begins anew."""
        return str(problem) == LATE


def alive() -> list[sqlite3.Connection]:
    """Connections that are open in this process, of other classes than ours, which tell by themselves.

    A class is referred to by its instances, and the looking takes long: not if there can be none.
    """
    global _floor
    found: list[sqlite3.Connection] = []
    kinds: list[Any] = [sqlite3.Connection]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if issubclass(kind, SeenConnection) or (kind is sqlite3.Connection and sys.getrefcount(kind) <= _floor):
            continue
        referring = gc.get_referrers(kind)
        found += [each for each in referring if type(each) is kind]
        if kind is sqlite3.Connection:
            modules = [sys.modules[name] for name in ("sqlite3", "sqlite3.dbapi2", "_sqlite3")]
            lasting = {id(kinds), *map(id, modules), *(id(vars(module)) for module in modules)}
            for ours in (kind, SeenConnection, TurnConnection):
                lasting |= {id(ours), id(ours.__mro__), id(ours.__bases__)}
            passing = [each for each in referring if id(each) not in lasting and not isinstance(each, _DESCRIPTORS)]
            _floor = sys.getrefcount(kind) - len(passing)
            del passing
        del referring
    return found
