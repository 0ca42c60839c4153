"""One connection of a job to a PostgreSQL database, and what the commands that ran on it mean for its transaction."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_HARMLESS = frozenset(
    re.findall(
        r"\w+",
        """
        SELECT INSERT UPDATE DELETE MERGE FETCH MOVE COPY VALUES EXECUTE EXPLAIN DECLARE CLOSE BEGIN START COMMIT
        ROLLBACK SAVEPOINT RELEASE SET RESET SHOW LOCK PREPARE DEALLOCATE LISTEN UNLISTEN NOTIFY ANALYZE VACUUM
        CHECKPOINT TRUNCATE DISCARD
        """,
    )
)
"""First words of the tags of commands that change no schema by themselves."""
LOCKING = re.compile(
    r"\W*(INSERT|UPDATE|DELETE|MERGE|LOCK|TRUNCATE)\b|.*\bFOR\s+(NO\s+KEY\s+)?(UPDATE|(KEY\s+)?SHARE)\b"
    r"|\W*WITH\b.*\b(INSERT|UPDATE|DELETE|MERGE)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Statements that lock rows, or wait for them."""
WRITERS = frozenset(("INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "TRUNCATE"))


@dataclass(eq=False)
class Handle:
    """One connection of the job to the database, tracked while a delivery runs."""

    raw: Any
    record: Any
    """SQLAlchemy's connection record, to invalidate it at the end of the delivery; None for a plain connection."""
    pid: int | None
    """Of its backend, if its locks can be seen there."""
    renew: Callable[[Any], bool]
    """Makes it as new for the next delivery, or says that it must be closed."""
    unhooked: bool = False
    """Its commits may pass unseen: then it is looked at before each boundary whether its transaction has ended."""
    open: bool = False
    """A transaction was open after its last statement."""
    fresh: bool = False
    """And nothing has been asked in it yet: it has no snapshot, and nobody can notice it."""
    failed: bool = False
    """And that had failed: it can only be rolled back."""
    wrote: bool = False
    lost: bool = False
    owner: object = None
    """The delivery that it belongs to, where several run."""
    tells: bool = False
    """It says when the server has looked whether deliveries wait for each other."""
    commits: bool = False
    """Its driver has sent a COMMIT."""
    cursor: Any = None
    """What runs a statement, until it is known what that has done."""
    strict: bool = False
    """A statement has asked for a level above READ COMMITTED for this transaction."""
    hasty: bool = False
    """A statement has set a time for locks."""
    altered: bool = False
    """A command has run in the open transaction that may have changed the schema."""

    def ran(self, words: Sequence[str]) -> None:
        """Commands of these names have run."""
        self.fresh = False
        self.altered = self.altered or not _HARMLESS.issuperset(words)
        self.wrote = self.wrote or not WRITERS.isdisjoint(words)

    def over(self) -> bool:
        """The transaction ends. Might it have changed the schema?"""
        altered, self.open, self.altered, self.wrote = self.altered, False, False, False
        self.strict = False
        return altered
