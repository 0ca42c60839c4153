"""Numbers that deliveries have drawn from sequences, and UUIDs that a store has drawn at random, renamed per state.

No rollback brings back a number, so each death of a delivery would make a new state, for ever. But what a job does
depends on such numbers only by which are equal, and which of two was drawn first. So in a state they are renamed: those
that anybody remembers (a row, a delivery that is alive) become the first ones, in the order in which they were drawn.
That needs numbers that cannot be taken for anything else: sequences are moved to where they give large ones before.

A UUID counts as the number that it is. Those that come to light in one move are named in the order in which they do.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from retrychaos.model.ledger import Cell, Facts, Relation, Row, Version
from retrychaos.world.resource import MOST_DRAWN, RandomIds, Resource, SerialCounter
from retrychaos.world.world import World

Renaming: TypeAlias = Mapping[int, int]
"""Numbers that become others; those that it does not name stay."""

FORGOTTEN = MOST_DRAWN // 2
"""Numbers of a sequence that this one and later ones stand for are remembered by nobody."""
_RUN = re.compile(r"\d{9,}")
_UUID = r"(?<![0-9a-f])[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}(?![0-9a-f])"
_UUID_OR_RUN = re.compile(rf"{_UUID}|\d{{9,}}", re.IGNORECASE)
_SHORTEST_UUID = 32


@dataclass
class Draws:
    """Tells drawn numbers from all others. Without any sequences, there are none."""

    counters: Sequence[SerialCounter | RandomIds] = ()
    is_known: Callable[[int], bool] = frozenset().__contains__
    """A UUID that no store has drawn: it was there before, is always the same, or is a delivery's own."""
    _in_relations: dict[int, tuple[Relation, frozenset[int]]] = field(default_factory=dict)
    _versions: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[Version, Version]] = field(default_factory=dict)

    def sequence_of(self, number: int) -> int:
        """Which sequence it is from, by its place in `counters`; -1 if from none."""
        for place, counter in enumerate(self.counters):
            if counter.gave(number):
                return -1 if isinstance(counter, RandomIds) and self.is_known(number) else place
        return -1

    def is_random(self, number: int) -> bool:
        return any(isinstance(counter, RandomIds) and counter.gave(number) for counter in self.counters)

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        return _UUID_OR_RUN if any(isinstance(each, RandomIds) for each in self.counters) else _RUN

    # -- finding ----------------------------------------------------------------------------------------------------

    def in_text(self, text: str) -> frozenset[int]:
        if not self.counters:
            return frozenset()
        return frozenset(n for n in map(_number, self._tokens.findall(text)) if self.sequence_of(n) >= 0)

    def in_version(self, version: Version | None) -> frozenset[int]:
        if not self.counters or version is None:
            return frozenset()
        return frozenset().union(*map(self._in_relation, version.relations.values()))

    def _in_relation(self, relation: Relation) -> frozenset[int]:
        known = self._in_relations.get(id(relation))
        if known is None or known[0] is not relation:
            found = frozenset().union(*(self._in_cell(cell) for row in relation.rows for cell in row))
            known = self._in_relations[id(relation)] = (relation, found)
        return known[1]

    def _in_cell(self, cell: Cell) -> frozenset[int]:
        if isinstance(cell, str):
            return self.in_text(cell)
        if isinstance(cell, int):
            return frozenset((cell,)) if self.sequence_of(cell) >= 0 else frozenset()
        if isinstance(cell, bytes):
            return self.in_text(cell.decode("latin-1"))
        if isinstance(cell, tuple):
            return frozenset().union(*map(self._in_cell, cell))
        return frozenset()

    # -- renaming ---------------------------------------------------------------------------------------------------

    def text(self, text: str, renaming: Renaming) -> str:
        if not renaming:
            return text
        return self._tokens.sub(lambda found: _renamed(found[0], renaming), text)

    def version(self, version: Version, renaming: Renaming) -> Version:
        """The version with other numbers; the same object if it holds none of them."""
        mine = tuple(sorted((one, renaming[one]) for one in self.in_version(version) if one in renaming))
        if all(one == other for one, other in mine):
            return version
        known = self._versions.get((id(version), mine))
        if known is None or known[0] is not version:
            relations = {name: self._relation(each, dict(mine)) for name, each in version.relations.items()}
            known = self._versions[id(version), mine] = (version, replace(version, relations=relations))
        return known[1]

    def _relation(self, relation: Relation, renaming: Renaming) -> Relation:
        if renaming.keys().isdisjoint(self._in_relation(relation)):
            return relation
        generated = {
            column: frozenset(self._cell(cell, renaming) for cell in cells)
            for column, cells in relation.generated.items()
        }
        rows: list[Row] = [tuple([self._cell(cell, renaming) for cell in row]) for row in relation.rows]
        if any(map(self.is_random, renaming)):
            rows.sort(key=repr)  # the order of random values says nothing
        return replace(relation, rows=tuple(rows), generated=generated)

    def _cell(self, cell: Cell, renaming: Renaming) -> Cell:
        if isinstance(cell, str):
            return self.text(cell, renaming)
        if isinstance(cell, int):
            return renaming.get(cell, cell)
        if isinstance(cell, bytes):
            return self.text(cell.decode("latin-1"), renaming).encode("latin-1")
        if isinstance(cell, tuple):
            return tuple([self._cell(each, renaming) for each in cell])
        return cell

    def in_order(self, text: str) -> Iterator[int]:
        """What a text has of UUIDs that a store has drawn, in the order in which they stand in it."""
        return (n for n in map(_number, self._tokens.findall(text)) if self.is_random(n) and self.sequence_of(n) >= 0)

    def in_order_of_rows(self, version: Version) -> Iterator[int]:
        """The same of a version, whose rows are in an order that does not depend on them."""
        for _, relation in sorted(version.relations.items()):
            if not any(map(self.is_random, self._in_relation(relation))):
                continue
            blind = dict.fromkeys(filter(self.is_random, self._in_relation(relation)), 0)
            for row in sorted(relation.rows, key=lambda row: repr([self._cell(cell, blind) for cell in row])):
                yield from self.in_order(repr(row))

    def compact(self, remembered: Iterable[int]) -> dict[int, int]:
        """What becomes of each of these: the first numbers of their sequences, in the same order."""
        places: dict[int, list[int]] = {}
        for number in remembered:
            places.setdefault(self.sequence_of(number), []).append(number)
        return {
            number: self.counters[place].number(rank)
            for place, numbers in places.items()
            for rank, number in enumerate(sorted(numbers))
        }

    def forget(self, numbers: Iterable[int], renaming: Renaming) -> dict[int, int]:
        """The same for numbers that nobody may remember: those that `renaming` does not name become other ones, which
        are the same in whatever state they were forgotten."""
        forgotten = self.compact(number for number in numbers if number not in renaming)
        places = {name: self.counters[self.sequence_of(name)] for name in forgotten.values()}
        return {**renaming, **{one: name + FORGOTTEN * places[name].step for one, name in forgotten.items()}}

    def counted(self, remembered: Iterable[int]) -> tuple[int, ...]:
        """How many of each sequence."""
        counts = [0] * len(self.counters)
        for number in remembered:
            counts[self.sequence_of(number)] += 1
        return tuple(counts)


def uuids_in(facts: Facts) -> frozenset[int]:
    """Those of version 4 in whatever cell."""
    looking = Draws((RandomIds(""),))
    return frozenset().union(*map(looking.in_version, facts.values()))


def _number(token: str) -> int:
    return int(token.replace("-", ""), 16) if len(token) >= _SHORTEST_UUID else int(token)


def _renamed(token: str, renaming: Renaming) -> str:
    number = _number(token)
    name = renaming.get(number, number)
    if name == number or len(token) < _SHORTEST_UUID:
        return token if name == number else str(name)
    return str(uuid.UUID(int=name)) if "-" in token else uuid.UUID(int=name).hex


class Drawing:
    """The numbers of sequences in one real run, and as whom they are known."""

    def __init__(self, world: World, draws: Draws, numbers: Renaming) -> None:
        self.numbers = dict(numbers)
        """A number that was really drawn, and what it is called."""
        self._draws = draws
        self._counters = {
            (counter.resource, counter.key): counter for counter in draws.counters if isinstance(counter, SerialCounter)
        }
        self._stand = {name: dict(resource.serials()) for name, resource in world.resources.items()}
        """Where counters stand."""
        self._known: dict[int, int] = {}
        """How many numbers of each counter have a name already, in the move that is looked at."""

    def look(
        self,
        remembered: Iterable[int],
        resources: Mapping[str, Resource],
        seen: Iterable[str] = (),
        versions: Iterable[Version] = (),
    ) -> tuple[int, ...]:
        """Names for the numbers that were drawn by a move from these resources.

        remembered: the names that were known before it. seen, versions: where random ones may come to light.
        """
        self._known = dict(enumerate(self._draws.counted(remembered)))
        drawn: list[int] = []
        for name, resource in resources.items():
            before = self._stand.get(name, {})
            now = self._stand[name] = dict(resource.serials())
            for key, upcoming in now.items():
                counter = self._counters.get((name, key))
                if counter is not None:
                    fresh = range(before.get(key, upcoming), upcoming, counter.step)
                    drawn += [self._name(each) for each in fresh if counter.gave(each)]
        if any(isinstance(counter, RandomIds) for counter in self._draws.counters):
            for number in self._come_to_light(seen, versions):
                if number not in self.numbers:
                    drawn.append(self._name(number))
        return tuple(drawn)

    def _come_to_light(self, seen: Iterable[str], versions: Iterable[Version]) -> Iterator[int]:
        for text in seen:
            yield from self._draws.in_order(text)
        for version in versions:
            if any(self._draws.is_random(n) and n not in self.numbers for n in self._draws.in_version(version)):
                yield from self._draws.in_order_of_rows(version)

    def _name(self, number: int) -> int:
        """What a number is called that has not been met before: the next one of its sequence."""
        place = self._draws.sequence_of(number)
        rank = self._known.get(place, 0)
        self._known[place] = rank + 1
        name = self.numbers[number] = self._draws.counters[place].number(rank)
        return name

    def rename(self, renaming: Renaming, remembered: frozenset[int]) -> None:
        """Names have become others, and only some are still of use."""
        renamed = {number: renaming.get(name, name) for number, name in self.numbers.items()}
        self.numbers = {number: name for number, name in renamed.items() if name in remembered}

    def text(self, text: str) -> str:
        """A text with the names of the numbers in it."""
        return self._draws.text(text, self._met(self._draws.in_text(text)))

    def version(self, version: Version) -> Version:
        return self._draws.version(version, self._met(self._draws.in_version(version)))

    def _met(self, numbers: Iterable[int]) -> Renaming:
        # A connection may have been given several at once, of which some come to light only now.
        for number in sorted(numbers):
            if number not in self.numbers:
                self._name(number)
        return self.numbers

    def unspaced(self, resource: str, stand: Mapping[Hashable, int]) -> Hashable:
        """Where those counters of a resource stand whose numbers have no names: these are a part of its state."""
        return tuple(sorted((repr(key), at) for key, at in stand.items() if (resource, key) not in self._counters))

    def serials_of(self, resource: Resource) -> Hashable:
        if resource.name not in self._stand:
            self._stand[resource.name] = dict(resource.serials())
        return self.unspaced(resource.name, self._stand[resource.name])
