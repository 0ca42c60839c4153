"""Where requests go that no provider answers: servers on this machine, and tools of the test that answer requests.

Only what arrived is known of them. Their own state is not put back.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.world.http_model import REPEATABLE, Request, body_cell, url_cell
from retrychaos.world.resource import Plain


class Elsewhere(Plain):
    """What reached others than providers: servers on this machine, and tools of the test that answer requests.

    Only what arrived is known of them; their own state is not put back.
    """

    name = "http"
    label = "HTTP servers"
    alone = ""

    def __init__(self) -> None:
        self.version = Version({})
        self.commits = 0
        self.shared = False
        """A real server was spoken to, which forks have in common."""
        self._rows: tuple[tuple[str, Row], ...] = ()
        self._relations: dict[tuple[str, tuple[Row, ...]], Relation] = {}

    def arrived(self, effect: str, request: Request) -> None:
        row = (url_cell(request.url), body_cell(request))
        if request.method not in REPEATABLE or (effect, row) not in self._rows:
            self._rows = (*self._rows, (effect, row))

    @property
    def private(self) -> bool:
        return not self.shared

    def refresh(self) -> Version:
        if len(self._rows) != sum(len(relation.rows) for relation in self.version.relations.values()):
            self.commits += 1
            grouped: dict[str, list[Row]] = {}
            for effect, row in self._rows:
                grouped.setdefault(effect, []).append(row)
            self.version = Version({name: self._relation(name, tuple(rows)) for name, rows in grouped.items()})
        return self.version

    def _relation(self, name: str, rows: tuple[Row, ...]) -> Relation:
        known = self._relations.get((name, rows))
        if known is None:
            again = name.split()[0] in REPEATABLE
            known = Relation(name, ("url", "body"), rows, external=True, repeatable=again)
            self._relations[name, rows] = known
        return known

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> tuple[tuple[str, Row], ...]:
        return self._rows

    def restore(self, version: Version, blob: tuple[tuple[str, Row], ...]) -> None:
        self._rows, self.version = blob, version

    def end_delivery(self) -> Sequence[str]:
        return ()

    def holds(self, owner: object) -> str:
        return ""

    def shift(self, seconds: float) -> None:
        """Servers have clocks of their own."""

    def land(self, ahead: float) -> None:
        """What has arrived stays."""

    def shift_ids(self, by: int) -> None:
        """Nothing is known of ids that servers draw."""

    def distrust(self) -> None:
        """Only what this process has sent is known anyway."""

    def close(self) -> None:
        self._rows, self._relations = (), {}
