"""When are two ledgers the same? Volatile values are found per cell and renamed, and rows compared as multisets.

Three kinds of volatile value: drawn ones (random bytes, process ids, row ids that the store drew), which are *names*:
they may differ between two ledgers, but must be used in the same places; times, which are the clock's; and cells that
differed between two clean runs for a reason unknown, which are names too.

Names are renamed by colour refinement: a name's colour is the multiset of the places where it occurs, so that no order
of appearance matters.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from retrychaos.explore.pairing import pairs
from retrychaos.explore.refine import Name, coloured, hash_of, refine
from retrychaos.explore.volatile import (
    RANDOM,
    ROW_ID,
    STREAM_ID,
    TIME,
    VOLATILE,
    Draws,
    Hole,
    alike,
    leaves_of,
    moment,
)
from retrychaos.model.ledger import Cell, Facts, Relation, Row
from retrychaos.runtime.chance import Chance
from retrychaos.runtime.clock import Clock
from retrychaos.runtime.letters import SHORTEST

Place: TypeAlias = tuple[str, str]
"""Resource name, relation name."""
Template: TypeAlias = tuple[Any, ...]
"""A row with its names and times blanked out, as leaves."""
View: TypeAlias = tuple[Template, ...]
"""The same, column by column."""

_MASK = 2**128 - 1
_MOST_ROWS = 500_000
_DRAWN = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|[0-9a-fA-F]{8,}|\b\d{7,}\b")
_BASE64 = re.compile(r"[A-Za-z0-9_+/-]{8,}")
_NUMBER = re.compile(r"\d+")
_STREAM_ID = re.compile(r"\d{13}-\d+")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\d{8}T\d{6}")


_Spots: TypeAlias = tuple[tuple[int, str], ...]
"""Positions in a template that are volatile, and of what kind the names there are."""
_Samples: TypeAlias = tuple[tuple[Any, Any], ...]
"""For each of these positions, what stood there in two clean runs."""
IdPairs: TypeAlias = Mapping[str, tuple[Set[Cell], Set[Cell]]]
"""Table -> row ids drawn in one run, and in another."""


@dataclass(frozen=True)
class Form:
    """A row seen as template and names: ``names[i]`` stands in the i-th hole that is a name."""

    template: Template
    names: tuple[Name, ...]
    local: int
    """Hash of the row if its names occur nowhere else: template and which of its names are equal."""
    view: View
    """The template, column by column."""


@dataclass(frozen=True, eq=False)
class _Shape:
    """A relation seen as forms: the sum of their local hashes, and where its names occur."""

    forms: tuple[Form, ...]
    total: int
    names: Mapping[Name, int]
    """In how many rows."""


class Canon:
    """The sameness of ledgers within one check. It learns: patterns are added, never removed."""

    def __init__(self, clock: Clock, chance: Chance, neutral: Facts) -> None:
        self._clock = clock
        self._patterns: dict[Place, dict[_Spots, dict[Template, _Samples]]] = defaultdict(lambda: defaultdict(dict))
        self._stable: dict[Place, set[Template]] = defaultdict(set)
        """Rows that were the same in two clean runs at the same boundary: nothing in them is volatile."""
        self._texts: dict[Place, dict[str, tuple[str, ...]]] = defaultdict(dict)
        """Texts that hold row ids, with # for each number, and whose ids these are."""
        self._masked: set[Place] = set()
        self._offsets: set[int] = {0}
        self._real_offsets: set[int] = set()
        """As _offsets, for times that a store has read off a clock of its own."""
        self._moments: frozenset[int] = frozenset()
        self._moments_of = (0, 0)
        self._draws = Draws(chance)
        self._ids: dict[Place, set[Cell]] = defaultdict(set)
        """Row ids that stores drew in this check, by table."""
        self._rows: dict[Place, dict[Row, Form]] = defaultdict(dict)
        self._shapes: dict[int, tuple[Relation, _Shape]] = {}
        self._stored: dict[int, tuple[Relation, tuple[int, ...]]] = {}
        self._held = 0
        self._marks: dict[tuple[tuple[str, tuple[Relation, ...]], ...], bytes] = {}
        """Fingerprints known already, by the relations that they are of."""
        self._caps: dict[Place, Counter[Template]] = {}
        self._blind: tuple[str, ...] = ()
        self._judges = False
        """What others remember is left out of account."""
        self._old: tuple[int, Set[Cell]] = (0, frozenset())
        self.neutral = neutral
        """The state in which resources were found; a relation that is as then adds nothing to a fingerprint."""

    # -- comparing --------------------------------------------------------------------------------------------------

    def fingerprint(self, facts: Facts) -> bytes:
        """Equal for two states if and only if they are the same after renaming (up to hash collisions)."""
        key = tuple([(resource, tuple(version.relations.values())) for resource, version in facts.items()])
        mark = self._marks.get(key)
        if mark is None:
            self._note_ids(facts)
            mark = self._marks[key] = self._fingerprint(facts)
        return mark

    def _fingerprint(self, facts: Facts) -> bytes:
        total = 0
        shared: Counter[Name] = Counter()
        shapes: list[tuple[Place, _Shape]] = []
        for place, relation, neutral in self._relations(facts):
            if relation is neutral:
                continue
            shape = self._shape(place, relation)
            total += self._capped(place, shape)
            if neutral is not None:
                total -= self._shape(place, neutral).total
            shapes.append((place, shape))
            shared.update(shape.names)
        common = {name for name, rows in shared.items() if rows > 1}
        if common:
            involved = [(p, form) for p, shape in shapes for form in shape.forms if not common.isdisjoint(form.names)]
            colours = refine(involved, common)
            for place, form in involved:
                total += hash_of(("shared", place, coloured(form, colours))) - form.local
        return (total & _MASK).to_bytes(16, "big")

    def mark(self, facts: Facts, at: float | None = None) -> bytes:
        """As fingerprint(), for what will happen: a stored time that is yet to come is another thing than one that is
        over. at: when (None: now)."""
        mark = self.fingerprint(facts)
        if max(self._offsets) <= 0:
            return mark
        now = self._clock.now() if at is None else at
        coming = [
            (place, left)
            for place, relation, neutral in self._relations(facts)
            if relation is not neutral and (left := sum(end > now for end in self._times(relation)))
        ]
        return hashlib.blake2b(mark + repr(coming).encode(), digest_size=len(mark)).digest() if coming else mark

    def _times(self, relation: Relation) -> tuple[int, ...]:
        """Times that are stored there, in seconds since the epoch."""
        known = self._stored.get(id(relation))
        if known is None or known[0] is not relation:
            leaves = (leaf for row in relation.rows for cell in row for leaf in leaves_of(cell))
            times = (moment(leaf) for leaf in leaves if _may_be_time(leaf) and self._is_time(leaf))
            known = self._stored[id(relation)] = (relation, tuple(time for time in times if time is not None))
        return known[1]

    def templates(self, place: Place, relation: Relation) -> Counter[Template]:
        """The rows of a relation with volatile values blanked."""
        return Counter(form.template for form in self._shape(place, relation).forms)

    def cap(self, place: Place, counts: Counter[Template]) -> None:
        """More of these rows than `counts` make no difference (a tolerated effect that nobody can read back)."""
        self._caps[place] = counts
        self._marks.clear()

    # -- learning ---------------------------------------------------------------------------------------------------

    def learn(self, place: Place, one: Relation, other: Relation, ids: IdPairs, clocks: tuple[float, float]) -> bool:
        """Two clean runs left these at the same boundary: what differs is volatile. Was anything new?

        ids: the row ids that the stores drew, per table, in the one run and in the other. A number that is a row id in
        both is a reference, declared or not. clocks: of the runs at that boundary.
        """
        if one is other:
            return False
        left = Counter(self._form(place, one, row).template for row in one.rows)
        right = Counter(self._form(place, other, row).template for row in other.rows)
        only_left, only_right = list((left - right).elements()), list((right - left).elements())
        learned = False
        paired = list(pairs(only_left, only_right, _apart))
        leaves = [(a, b) for mine, theirs in paired for a, b in zip(mine, theirs, strict=True) if a != b]
        fresh = [self._learn_real_time(a, b) for a, b in leaves]  # all of them, before any is looked at
        if any(fresh):
            self._forget()
            self.learn(place, one, other, ids, clocks)
            return True
        for mine, theirs in paired:
            differing = tuple(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            if all(self._learn_time(mine[i], theirs[i], clocks) for i in differing):
                learned = True
                continue
            if all(self._learn_text(place, mine[i], theirs[i], ids) for i in differing):
                learned = True
                continue
            spots = tuple((i, _reference(mine[i], theirs[i], ids)) for i in differing)
            key = _blank(mine, differing)
            if key not in self._patterns[place][spots]:
                self._patterns[place][spots][key] = tuple((mine[i], theirs[i]) for i in differing)
                learned = True
        if learned:
            self._forget()
        return learned

    def mask(self, place: Place) -> None:
        """Names found by comparing clean runs are not names here: they differ without being used consistently."""
        self._masked.add(place)
        self._forget()

    def _learn_text(self, place: Place, mine: Any, theirs: Any, ids: IdPairs) -> bool:
        """Two texts that differ in row ids only, such as an address of a page: ids are names there, the rest is not."""
        if not (isinstance(mine, str) and isinstance(theirs, str)):
            return False
        skeleton = _NUMBER.sub("#", mine)
        if len(skeleton) < 6 or skeleton != _NUMBER.sub("#", theirs):
            return False
        kinds: list[str] = []
        for one, two in zip(_NUMBER.findall(mine), _NUMBER.findall(theirs), strict=True):
            kinds.append("" if one == two else _reference(int(one), int(two), ids))
        if "volatile" in kinds:
            return False
        self._texts[place][skeleton] = tuple(kinds)
        return True

    def _learn_time(self, mine: Any, theirs: Any, clocks: tuple[float, float]) -> bool:
        """Two moments at the same distance from the clocks of their runs: a time, at that distance from now on.

        That from an instant after it was written means nothing: a delivery that dies before has no such instant.
        """
        one, two = moment(mine), moment(theirs)
        if one is None or two is None or not (_shows_seconds(mine) and _shows_seconds(theirs)):
            return False
        instants = [{int(now) for now in self._clock.instants if now <= end} for end in clocks]
        shared = {one - now for now in instants[0]} & {two - now for now in instants[1]}
        if not shared:
            return False
        self._offsets.add(min(shared, key=abs))
        self._moments_of = (0, 0)
        return True

    def _forget(self) -> None:
        self._rows.clear()
        self._shapes.clear()
        self._stored.clear()
        self._marks.clear()

    # -- forms ------------------------------------------------------------------------------------------------------

    def _relations(self, facts: Facts) -> Iterator[tuple[Place, Relation, Relation | None]]:
        for resource, version in facts.items():
            neutral = self.neutral.get(resource)
            for name, relation in version.relations.items():
                if self._judges and relation.memory:
                    continue
                if not self._blind or not self.ignores((resource, name)):
                    yield (resource, name), relation, neutral.relations.get(name) if neutral else None
            if neutral is not None:
                for name, relation in neutral.relations.items():
                    # The relation is gone, and that is a difference.
                    if name not in version.relations and not (self._judges and relation.memory):
                        if self.ignores((resource, name)):
                            continue
                        yield (resource, name), Relation(name, relation.columns, ()), relation

    def _shape(self, place: Place, relation: Relation) -> _Shape:
        found = self._shapes.get(id(relation))
        if found is not None and found[0] is relation:
            return found[1]
        memo = self._rows[place]
        forms: list[Form] = []
        total = 0
        names: dict[Name, int] = {}
        for row in self.counted(place, relation):
            form = memo.get(row) or self._form(place, relation, row)
            forms.append(form)
            total += form.local
            if form.names:
                for name in set(form.names):
                    names[name] = names.get(name, 0) + 1
        shape = _Shape(tuple(forms), total, names)
        self._held += len(forms)
        if self._held > _MOST_ROWS:  # a cache, not a record: big tables must not pile up
            self._forget()
            self._held = len(forms)
        self._shapes[id(relation)] = (relation, shape)
        return shape

    def counted(self, place: Place, relation: Relation) -> Iterable[Row]:
        """The rows that count: a receiver that honours keys ignores a call whose key it knows, and to replace the same
        by the same again changes nothing.

        A call that differs in more than volatile values counts, though: the receiver refuses it, or should.
        """
        if not relation.external or not (relation.columns[:1] == ("key",) or relation.repeatable):
            return relation.rows
        first: dict[Any, Row] = {}
        for number, row in enumerate(relation.rows):
            key = (number,) if row[0] is None else (row[0], self._form(place, relation, row).template)
            first.setdefault(key, row)
        return first.values()

    def _capped(self, place: Place, shape: _Shape) -> int:
        cap = self._caps.get(place)
        if cap is None:
            return shape.total
        left = Counter(cap)
        total = 0
        for form in shape.forms:
            if form.template not in cap or left[form.template] > 0:
                left[form.template] -= 1
                total += form.local
        return total

    def _form(self, place: Place, relation: Relation, row: Row) -> Form:
        memo = self._rows[place]
        form = memo.get(row)
        if form is None:
            form = self._make(place, relation, row)
            memo[row] = form
        return form

    def _make(self, place: Place, relation: Relation, row: Row) -> Form:
        leaves, names, starts = self._take_apart(place, relation, row)
        template = tuple(leaves)
        for spots, known in self._patterns[place].items():
            positions = [at for at, _ in spots]
            if self._is_volatile(place, template, spots, positions, known):
                names = [(at, name) for at, name in names if at not in positions]
                if place not in self._masked:
                    names += [(at, (kind, _value(template[at], kind))) for at, kind in spots]
                template = _blank(template, positions)
        ordered = tuple(name for _, name in sorted(names, key=lambda item: item[0]))
        seen: dict[Name, int] = {}
        pattern = tuple(seen.setdefault(name, len(seen)) for name in ordered)
        view = tuple(template[start:end] for start, end in pairwise([*starts, len(template)]))
        return Form(template, ordered, hash_of((place, template, pattern)), view)

    def _is_volatile(
        self,
        place: Place,
        template: Template,
        spots: _Spots,
        positions: Sequence[int],
        known: Mapping[Template, _Samples],
    ) -> bool:
        """The row differs from one of the clean run in volatile cells only, by values of the same make."""
        if max(positions, default=-1) >= len(template) or template in self._stable[place]:
            return False
        samples = known.get(_blank(template, positions))
        return samples is not None and all(
            self._is_id(kind, template[at]) if kind != "volatile" else alike(template[at], *sample)
            for (at, kind), sample in zip(spots, samples, strict=True)
        )

    def _is_id(self, kind: str, leaf: Any) -> bool:
        number = _value(leaf, kind)
        return any(number in ids for (_, table), ids in self._ids.items() if kind == f"{table} id")

    def settle(self, place: Place, one: Relation, other: Relation) -> None:
        """Two clean runs left these at the same boundary: what is equal there is not volatile, such as a cell that is
        yet to be filled. Call it when all differences were learned."""
        if not self._patterns.get(place):
            return
        left, right = (
            {tuple(self._take_apart(place, relation, row)[0]) for row in relation.rows} for relation in (one, other)
        )
        self._stable[place] |= left & right
        self._forget()

    def _take_apart(
        self, place: Place, relation: Relation, row: Row
    ) -> tuple[list[Any], list[tuple[int, Name]], list[int]]:
        """The leaves of a row, the names among them with their positions, and where each column begins."""
        leaves: list[Any] = []
        names: list[tuple[int, Name]] = []
        starts: list[int] = []
        known = place in self._texts
        blind = self._blind_columns(place, relation, row) if self._blind else ()
        for index, cell in enumerate(row):
            starts.append(len(leaves))
            if index in blind:
                leaves.append(VOLATILE)
                continue
            table = place[1] if index in relation.generated else relation.refs.get(index)
            if table is not None and cell in self._ids.get((place[0], table), ()):
                names.append((len(leaves), (f"{table} id", cell)))
                leaves.append(ROW_ID)
            else:
                for leaf in leaves_of(cell):
                    kinds = self._texts[place].get(_NUMBER.sub("#", leaf)) if isinstance(leaf, str) and known else None
                    if kinds is not None:
                        self._add_ids(leaf, kinds, leaves, names)
                    else:
                        self._add_leaf(leaf, leaves, names)
        return leaves, names, starts

    def view(self, place: Place, relation: Relation, row: Row) -> View:
        """The template of a row, column by column."""
        return self._form(place, relation, row).view

    def judging(self, ignored: Sequence[str], memory: bool = False) -> Canon:
        """The same eyes, but blind to the cells that the user declared volatile, and to what others remember.

        Only for the final comparison: to the job the values are there, so states that differ in them stay apart.
        memory: there are such relations.
        """
        if not ignored and not memory:
            return self
        other = copy.copy(self)
        other._judges = memory
        other._blind = tuple(ignored)
        other._rows = defaultdict(dict)
        other._shapes = {}
        other._marks = {}
        return other

    def ignores(self, place: Place) -> bool:
        """The user declared the whole relation volatile."""
        name = place[1].removeprefix("call ")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._blind)

    def blind_to(self, ignored: Sequence[str]) -> None:
        """These cells differ without reason: states are not told apart by them either."""
        self._blind = tuple(ignored)
        self._forget()

    def _blind_columns(self, place: Place, relation: Relation, row: Row) -> set[int]:
        name = place[1].removeprefix("call ")
        out: set[int] = set()
        for pattern in self._blind:
            if relation.ttl is not None and fnmatch.fnmatchcase(f"redis:{row[0]!s}", pattern):
                out |= set(range(2, len(row)))
            else:
                out |= {
                    index
                    for index, column in enumerate(relation.columns)
                    if fnmatch.fnmatchcase(f"{name}.{column}", pattern)
                }
        return out

    def _note_ids(self, facts: Facts) -> None:
        """Remember which row ids the stores drew, so that references to them are recognised in other tables."""
        for resource, version in facts.items():
            if version.real_time and not self._real_offsets:
                self._real_offsets.add(0)
                self._forget()
            for name, relation in version.relations.items():
                for ids in relation.generated.values():
                    known = self._ids[(resource, name)]
                    if not ids <= known:
                        known |= ids
                        self._forget()

    def _add_leaf(self, leaf: Any, leaves: list[Any], names: list[tuple[int, Name]]) -> None:
        kind = type(leaf)
        if kind is str:
            if len(leaf) >= SHORTEST:
                self._add_text(leaf, leaves, names)
                return
        elif kind is int or kind is float:
            if self._draws.number(leaf):
                names.append((len(leaves), ("random", leaf)))
                leaves.append(RANDOM)
                return
            if leaf > 1e8 and self._is_time(leaf):
                leaves.append(TIME)
                return
        elif kind is bytes and self._draws.raw(leaf):
            names.append((len(leaves), ("random", leaf.hex())))
            leaves.append(RANDOM)
            return
        leaves.append(leaf)

    def _add_ids(self, text: str, kinds: Sequence[str], leaves: list[Any], names: list[tuple[int, Name]]) -> None:
        start = 0
        for match, kind in zip(_NUMBER.finditer(text), kinds, strict=True):
            if kind and self._is_id(kind, match.group()):
                names.append((len(leaves) + 1, (kind, int(match.group()))))
                leaves += (text[start : match.start()], ROW_ID)
                start = match.end()
        leaves.append(text[start:])

    def _add_text(self, text: str, leaves: list[Any], names: list[tuple[int, Name]]) -> None:
        """A text may hold several drawn values: each becomes a leaf of its own, and so does what is between them."""
        if _TIME.match(text) and self._is_time(text):
            leaves.append(TIME)
            return
        if _STREAM_ID.fullmatch(text) and self._is_time(int(text.partition("-")[0])) and text not in self._old_ids():
            names.append((len(leaves), ("stream id", text)))
            leaves.append(STREAM_ID)
            return
        if text.isdigit() and self._is_time(int(text)):
            leaves.append(TIME)
            return
        start = 0
        for match in _DRAWN.finditer(text):
            token = match.group()
            digits = token.isdigit()
            if (digits and self._draws.number(int(token))) or self._draws.text(token.replace("-", "").lower()):
                hole = RANDOM
                names.append((len(leaves) + 1, ("random", token.replace("-", "").lower())))
            elif digits and self._is_time(int(token)):
                hole = TIME
            else:
                continue
            leaves += (text[start : match.start()], hole)
            start = match.end()
        if start == 0:
            for begin, end in self._draws.words(text):
                names.append((len(leaves) + 1, ("random", text[begin:end])))
                leaves += (text[start:begin], RANDOM)
                start = end
        if start == 0:
            for match in _BASE64.finditer(text):
                if self._draws.text(match.group()):
                    names.append((len(leaves) + 1, ("random", match.group())))
                    leaves += (text[start : match.start()], RANDOM)
                    start = match.end()
        leaves.append(text[start:] if start else text)

    def _old_ids(self) -> Set[Cell]:
        """Ids of stream entries that were there before the job."""
        if len(self.neutral) != self._old[0]:
            streams = (
                relation.rows
                for version in self.neutral.values()
                for relation in version.relations.values()
                if relation.ttl is not None
            )
            self._old = (len(self.neutral), {row[2] for rows in streams for row in rows if row[1] == "stream"})
        return self._old[1]

    def _is_time(self, leaf: Any) -> bool:
        at = moment(leaf)
        if at is None:
            return False
        key = (len(self._clock.instants), len(self._offsets))
        if key != self._moments_of:
            self._moments_of = key
            self._moments = frozenset(int(now) + off for now in self._clock.instants for off in self._offsets)
        return at in self._moments or (bool(self._real_offsets) and self._is_real_time(at))

    def _is_real_time(self, at: int) -> bool:
        start, now = self._clock.real()
        return any(int(start) <= at - offset <= now + 1 for offset in self._real_offsets)

    def _learn_real_time(self, mine: Any, theirs: Any) -> bool:
        """Two moments that are as far apart as the runs were in real time: some distance from a store's own clock."""
        one, two = moment(mine), moment(theirs)
        start, now = self._clock.real()
        if not self._real_offsets or one is None or two is None or abs(one - two) > now - start + 1:
            return False
        offset = min(one, two) - int(start)
        known = offset in self._real_offsets
        self._real_offsets.add(offset)
        return not known


def _shows_seconds(leaf: Any) -> bool:
    """What has only a day or an hour is not so far from now as it was in another run."""
    return not isinstance(leaf, str) or leaf.isdigit() or _TIME.match(leaf) is not None


def _may_be_time(leaf: Any) -> bool:
    if isinstance(leaf, str):
        return leaf.isdigit() or _TIME.match(leaf) is not None
    return type(leaf) in (int, float) and leaf > 1e8


# -- pieces ---------------------------------------------------------------------------------------------------------


def _value(leaf: Any, kind: str) -> Cell:
    """What a name stands for; row ids are numbers, also where they are written as text."""
    if isinstance(leaf, Hole):
        return repr(leaf)
    return int(leaf) if kind != "volatile" and isinstance(leaf, str) and leaf.isdigit() else leaf


def _reference(mine: Any, theirs: Any, ids: IdPairs) -> str:
    """The kind of name for a cell that differs between two runs: a row id of some table, or anything else."""
    if isinstance(mine, str) and isinstance(theirs, str) and mine.isdigit() and theirs.isdigit():
        mine, theirs = int(mine), int(theirs)
    for table, (one, two) in ids.items():
        if type(mine) is int and mine in one and theirs in two:
            return f"{table} id"
    return "volatile"


def _blank(template: Template, positions: Iterable[int]) -> Template:
    wanted = set(positions)
    return tuple(VOLATILE if at in wanted else leaf for at, leaf in enumerate(template))


def _apart(mine: Template, theirs: Template) -> int | None:
    """In how many leaves two rows differ; only rows of the same shape can be compared."""
    return sum(a != b for a, b in zip(mine, theirs, strict=True)) if len(mine) == len(theirs) else None
