"""Steps: the operations of a delivery on resources, between whose boundaries a process can die."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """The line of the user's code that caused a step."""

    file: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a delivery.

    kind: ``sql``, ``commit``, ``redis``, ``call`` or ``sleep``.
    resource: name of the resource, stable over the processes of one check.
    text: what it does, without values; two runs of a deterministic job have the same texts.
    detail: the same with values, for people.
    """

    kind: str
    resource: str
    text: str
    detail: str
    site: Site | None = None

    @property
    def signature(self) -> tuple[str, str, str]:
        """What two runs of a deterministic job have in common here."""
        return (self.kind, self.resource, self.text)
