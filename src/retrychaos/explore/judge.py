"""Is a ledger that of the clean run? If not: what is duplicated, lost or changed."""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from retrychaos.explore.canon import Canon, Place, View
from retrychaos.explore.pairing import pairs
from retrychaos.explore.volatile import Hole
from retrychaos.model.leases import Lease, columns_of
from retrychaos.model.ledger import Facts, Relation, Row, Version
from retrychaos.model.report import Difference
from retrychaos.model.values import short

_ORDER = ("duplicated", "lost", "changed")


@dataclass(frozen=True)
class Deviation:
    """How a ledger differs from the baseline. `kind` is the gravest: an effect too many cannot be undone."""

    kind: str
    effect: str
    differences: tuple[Difference, ...]
    reason: str = ""
    cells: tuple[str, ...] = ()
    """What to declare volatile if the deviation is no fault: table.column, or a whole table."""


@dataclass(frozen=True)
class _Found:
    """One difference between a relation and its baseline."""

    kind: str
    effect: str
    lines: tuple[Difference, ...]
    cells: tuple[str, ...]
    is_left_behind: bool = False
    """Something is there that should not be."""


@dataclass(frozen=True)
class Rows:
    """The rows of one relation as counted views, with an example of each for people."""

    counts: Counter[View]
    examples: dict[View, Row]


_HALF_DONE = "what was begun was left half done, and no later delivery finishes it or takes it away"


class Judge:
    """Compares ledgers with the baseline of one check.

    `path` holds the states that the clean run went through, from the state before it on. A row that is as it was
    on that path, and no longer at its end, is work not done; a value that never was there is wrong.
    """

    def __init__(
        self,
        canon: Canon,
        baseline: Facts,
        path: Sequence[Facts],
        tolerate: Sequence[str],
        leases: Sequence[Lease] = (),
    ) -> None:
        self.canon = canon
        self.baseline = baseline
        self.tolerate = tolerate
        self.leases = leases
        self.tolerated: set[str] = set()
        """Patterns that were needed."""
        self.faded: set[str] = set()
        """What a crash leaves behind, and ends by itself."""
        self._mark = canon.fingerprint(baseline)
        self._flaw = self._reused_key(baseline)
        self._path = path
        self._seen: dict[Place, Counter[View]] = {}

    def judge(self, facts: Facts, elapsed: float = 0.0) -> Deviation | None:
        """None if the ledger is that of the clean run.

        elapsed: seconds on the clock since the first delivery began; what lives shorter may have ended meanwhile.
        """
        if self.canon.fingerprint(facts) == self._mark and (not self.tolerate or self._flaw):
            return self._flaw
        facts = {**self.canon.neutral, **facts}
        found: list[_Found] = []
        fewer: dict[Place, Counter[View]] = {}
        more: dict[Place, Counter[View]] = {}
        for place, mine, theirs in self._sides(facts):
            sides = _Sides(self, place, mine, theirs)
            fewer[place], more[place] = sides.forgive(elapsed)
            found += sides.compare()
        if found:
            kind = min((each.kind for each in found), key=_ORDER.index)
            # What is missing tells more than what was left behind.
            first = min((each for each in found if each.kind == kind), key=lambda each: each.is_left_behind)
            lines = tuple(line for each in found for line in each.lines)
            cells = tuple(cell for each in found for cell in each.cells)
            return Deviation(kind, first.effect, lines, _HALF_DONE if first.is_left_behind else "", cells)
        if self.canon.fingerprint(self._without(facts, more)) != self._expected(fewer):
            return Deviation("changed", "links between rows", (), "the same rows, but ids or tokens link other ones")
        return None

    def _expected(self, fewer: Mapping[Place, Counter[View]]) -> bytes:
        return self.canon.fingerprint(self._without(self.baseline, fewer)) if any(fewer.values()) else self._mark

    def _reused_key(self, facts: Facts) -> Deviation | None:
        """One key with several payloads, in the clean run already: a receiver that honours keys takes the first."""
        for place, relation in self._relations(facts):
            if not relation.external or relation.columns[:1] != ("key",):
                continue
            rows = self.rows(place, relation)
            by_key = Counter(rows.examples[view][0] for view in rows.counts)
            key = next((key for key, payloads in by_key.items() if key is not None and payloads > 1), None)
            if key is None:
                continue
            views = [view for view in rows.counts if rows.examples[view][0] == key]
            lines = tuple(
                Difference(effect_of(relation, view), self.describe(relation, rows.examples[view], view), 1, 1)
                for view in views
            )
            reason = "one key with several payloads: a receiver that honours keys refuses or ignores all but the first"
            return Deviation("changed", effect_of(relation, views[0]), lines, reason)
        return None

    def excess(self, facts: Facts) -> bool:
        """An external effect too many: no later delivery can undo it."""
        for place, mine, theirs in self._sides(facts):
            relation = theirs or mine
            if relation is not None and relation.external and not self._is_tolerated(place, relation):
                expected = self.rows(place, mine).counts if mine else Counter()
                if theirs and self.rows(place, theirs).counts - expected:
                    return True
        return False

    def tolerates(self, effect: str) -> bool:
        return self.pattern(effect) is not None

    def _sides(self, facts: Facts) -> Iterator[tuple[Place, Relation | None, Relation | None]]:
        # A resource that the clean run did not touch is there as it was found.
        before, after = dict(self._relations({**self.canon.neutral, **self.baseline})), dict(self._relations(facts))
        for place in sorted({*before, *after}):
            mine, theirs = before.get(place), after.get(place)
            if mine is not theirs:
                yield place, mine, theirs

    def _relations(self, facts: Facts) -> Iterator[tuple[Place, Relation]]:
        for resource, version in facts.items():
            for name, relation in version.relations.items():
                if not relation.memory and not self.canon.ignores((resource, name)):
                    yield (resource, name), relation

    def before(self, place: Place) -> Counter[View]:
        """The rows before the job began."""
        version = self._path[0].get(place[0])
        relation = version.relations.get(place[1]) if version is not None else None
        return self.rows(place, relation).counts if relation is not None else Counter()

    def on_path(self, place: Place) -> Counter[View]:
        """How often each row was there at most, on the way of the clean run."""
        seen = self._seen.get(place)
        if seen is None:
            resource, name = place
            versions = [facts[resource] for facts in self._path if resource in facts]
            relations = {version.relations[name] for version in versions if name in version.relations}
            seen = Counter()
            for relation in relations:
                seen |= self.rows(place, relation).counts
            self._seen[place] = seen
        return seen

    def _without(self, facts: Facts, forgiven: Mapping[Place, Counter[View]]) -> Facts:
        """The facts without rows that make no difference."""
        if not any(forgiven.values()):
            return facts
        out: dict[str, Version] = {}
        for resource, version in facts.items():
            relations = dict(version.relations)
            for name, relation in relations.items():
                left = Counter(forgiven.get((resource, name), ()))
                rows: list[Row] = []
                for row in relation.rows if left else ():
                    view = self.canon.view((resource, name), relation, row)
                    left[view] -= 1
                    if left[view] < 0:
                        rows.append(row)
                if left:
                    relations[name] = replace(relation, rows=tuple(rows))
            out[resource] = Version(relations)
        return out

    def rows(self, place: Place, relation: Relation) -> Rows:
        """The rows of a relation as counted views."""
        counts: Counter[View] = Counter()
        examples: dict[View, Row] = {}
        for row in self.canon.counted(place, relation):
            view = self.canon.view(place, relation, row)
            counts[view] += 1
            examples.setdefault(view, row)
        return Rows(counts, examples)

    def _is_tolerated(self, place: Place, relation: Relation) -> bool:
        return self.pattern(place[1].removeprefix("call ")) is not None

    def pattern(self, effect: str) -> str | None:
        """The tolerance that covers an effect."""
        for pattern in self.tolerate:
            if fnmatch.fnmatchcase(effect, pattern) or effect.startswith(f"{pattern}."):
                return pattern
        return None

    def describe(self, relation: Relation, row: Row, view: View) -> str:
        """A row for people: column=value, with volatile values blanked."""
        cells = []
        for column, cell, leaves in zip(relation.columns, row, view, strict=True):
            if cell is None and relation.ttl is not None:
                continue
            text = repr(leaves[0]) if len(leaves) == 1 and isinstance(leaves[0], Hole) else short(_text(cell, leaves))
            cells.append(f"{column}={text}")
        return " ".join(cells)


class _Sides:
    """One relation in the baseline and in the ledger that is judged."""

    def __init__(self, judge: Judge, place: Place, mine: Relation | None, theirs: Relation | None) -> None:
        relation = theirs or mine
        assert relation is not None
        self._judge = judge
        self._relation = relation
        self._expected = judge.rows(place, mine) if mine else Rows(Counter(), {})
        self._found = judge.rows(place, theirs) if theirs else Rows(Counter(), {})
        self._path = judge.on_path(place)
        self._leases = frozenset(index for index, _ in columns_of(judge.leases, relation))
        self._before = judge.before(place)
        self._examples = {**self._expected.examples, **self._found.examples}
        self._missing = self._expected.counts - self._found.counts
        self._extra = self._found.counts - self._expected.counts

    def forgive(self, elapsed: float) -> tuple[Counter[View], Counter[View]]:
        """Leave out rows whose absence or presence makes no difference: what ends by itself, and what is tolerated."""
        fewer: Counter[View] = Counter()
        more: Counter[View] = Counter()
        for view in list(self._missing):
            lives = self._ttl(view)
            if lives is not None and lives <= elapsed:
                fewer[view] = self._missing.pop(view)
        for view in list(self._extra):
            if self._ttl(view) is not None and not self._before[view] and self._is_left_behind(view):
                more[view] = self._extra.pop(view)
                self._judge.faded.add(self._effect(view))
            elif view in self._expected.counts and (pattern := self._judge.pattern(self._effect(view))) is not None:
                self._judge.tolerated.add(pattern)
                more[view] = self._extra.pop(view)
            elif self._is_lock(view):
                more[view] = self._extra.pop(view)
                self._judge.faded.add(self._effect(view))
        for old, new in self._leases_apart():
            self._missing -= Counter([old])
            self._extra -= Counter([new])
            fewer[old] += 1
            more[new] += 1
            self._judge.faded |= {self._cell(new, self._relation.columns[index]) for index in self._leases}
        return fewer, more

    def _is_left_behind(self, view: View) -> bool:
        """A lock or a mark of the job's own: as the clean run has it on its way, or needed only after a fault."""
        if self._found.counts[view] <= self._path[view]:
            return True
        known = {old[0] for some in (self._path, self._before, self._expected.counts) for old in some}
        return self._examples[view][1] == "string" and view[0] not in known and self._found.counts[view] == 1

    def _is_lock(self, view: View) -> bool:
        """A row of the job's own that says until when it is valid, as the clean run has it on its way."""
        if all(self._examples[view][index] is None for index in self._leases):
            return False
        keys = self._relation.keys or range(len(view))
        own = all(any(view[index] != old[index] for index in keys) for old in self._before)
        return own and self._found.counts[view] <= self._path[view]

    def _leases_apart(self) -> list[tuple[View, View]]:
        """Rows that differ only in when a claim on them ends."""
        if not self._leases:
            return []

        def distance(old: View, new: View) -> int | None:
            apart = [index for index, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            return len(apart) if self._leases.issuperset(apart) else None

        return list(pairs(list(self._missing.elements()), list(self._extra.elements()), distance))

    def compare(self) -> Iterator[_Found]:
        relation = self._relation
        distance = functools.partial(_distance, relation)
        for old, new in pairs(list(self._missing.elements()), list(self._extra.elements()), distance):
            self._missing -= Counter([old])
            self._extra -= Counter([new])
            known = not relation.external and new in self._path
            columns = [name for name, a, b in zip(relation.columns, old, new, strict=True) if a != b]
            cells = tuple(self._cell(old, column) for column in columns)
            lines = (self._line(old), self._line(new))
            yield _Found("lost" if known else "changed", self._effect(old), lines, cells)
        for view in self._extra:
            kind = self._kind_of_extra(view)
            yield _Found(kind, self._effect(view), (self._line(view),), (self._cell(view),), kind == "lost")
        for view in self._missing:
            yield _Found("lost", self._effect(view), (self._line(view),), (self._cell(view),))

    def _kind_of_extra(self, view: View) -> str:
        if self._relation.external:
            expected = self._expected.counts
            return "changed" if view not in expected and _reuses_key(self._relation, view, expected) else "duplicated"
        unfinished = view not in self._expected.counts and self._found.counts[view] <= self._path[view]
        return "lost" if unfinished else "duplicated"

    def _ttl(self, view: View) -> float | None:
        lives = None if self._relation.ttl is None else self._examples[view][self._relation.ttl]
        return lives if isinstance(lives, int | float) else None

    def _effect(self, view: View) -> str:
        return effect_of(self._relation, view)

    def _cell(self, view: View, column: str = "") -> str:
        if self._relation.ttl is not None:
            return f"redis:{self._effect(view).removeprefix('redis ')}"
        return f"{self._effect(view)}.{column}" if column else self._effect(view)

    def _line(self, view: View) -> Difference:
        row = self._judge.describe(self._relation, self._examples[view], view)
        return Difference(self._effect(view), row, self._expected.counts[view], self._found.counts[view])


def effect_of(relation: Relation, view: View) -> str:
    """What a row belongs to, for people: a table, a key, a call."""
    if relation.ttl is not None:
        return "redis " + "".join(repr(leaf) if isinstance(leaf, Hole) else str(leaf) for leaf in view[0])
    return relation.name.removeprefix("call ")


def _text(cell: object, leaves: tuple[object, ...]) -> object:
    if isinstance(cell, str) and any(isinstance(leaf, Hole) for leaf in leaves):
        return "".join(repr(leaf) if isinstance(leaf, Hole) else str(leaf) for leaf in leaves)
    return cell


def _reuses_key(relation: Relation, view: View, expected: Iterable[View]) -> bool:
    """The key of an expected effect came with another payload, which a receiver refuses or applies on top."""
    if relation.columns[:1] != ("key",) or view[0] == (None,):
        return False
    return any(each[0] == view[0] for each in expected)


def _distance(relation: Relation, old: View, new: View) -> int | None:
    """How far two rows are apart; None if they are not the same thing."""
    apart = sum(a != b for a, b in zip(old, new, strict=True))
    if relation.ttl is not None:
        return apart if old[:3] == new[:3] else None  # key, type, field
    drawn = any(isinstance(leaf, Hole) for index in relation.keys for leaf in old[index])
    if relation.keys and not drawn:
        if all(old[index] == new[index] for index in relation.keys):
            return apart
        rest = [index for index in range(len(old)) if index not in relation.keys]
        return len(old) if all(old[index] == new[index] for index in rest) else None
    return apart if 2 * apart <= len(old) else None
