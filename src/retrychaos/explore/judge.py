"""Is a ledger that of the clean run? If not: what is duplicated, lost or changed."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from retrychaos.explore.canon import Canon, Hole, Place, View
from retrychaos.model.ledger import Facts, Relation, Row
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


@dataclass(frozen=True)
class _Rows:
    """The rows of one relation as counted views, with an example of each for people."""

    counts: Counter[View]
    examples: dict[View, Row]


class Judge:
    """Compares ledgers with the baseline of one check.

    `path` holds the states that the clean run went through, from the state before it on. A row that is as it was
    on that path, and no longer at its end, is work not done; a value that never was there is wrong.
    """

    def __init__(self, canon: Canon, baseline: Facts, path: Sequence[Facts], tolerate: Sequence[str]) -> None:
        self.canon = canon
        self.baseline = baseline
        self.tolerate = tolerate
        self.tolerated: set[str] = set()
        """Patterns that were needed."""
        self._mark = canon.fingerprint(baseline)
        self._path: dict[Place, Counter[View]] = {}
        for facts in path:
            for place, relation in _relations(facts):
                seen = self._path.setdefault(place, Counter())
                seen |= self._rows(place, relation).counts
                self._path[place] = seen

    def judge(self, facts: Facts) -> Deviation | None:
        """None if the ledger is that of the clean run."""
        if self.canon.fingerprint(facts) == self._mark and not self.tolerate:
            return None
        found: list[tuple[str, str, list[Difference]]] = []
        for place, mine, theirs in self._sides(facts):
            found += self._compare(place, mine, theirs)
        if found:
            kind = min((kind for kind, _, _ in found), key=_ORDER.index)
            effect = next(effect for each, effect, _ in found if each == kind)
            return Deviation(kind, effect, tuple(line for _, _, lines in found for line in lines))
        if self.canon.fingerprint(facts) != self._mark and not self.tolerate:
            return Deviation("changed", "links between rows", (), "the same rows, but ids or tokens link other ones")
        return None

    def excess(self, facts: Facts) -> bool:
        """An external effect too many: no later delivery can undo it."""
        for place, mine, theirs in self._sides(facts):
            relation = theirs or mine
            if relation is not None and relation.external and not self._is_tolerated(place, relation):
                expected = self._rows(place, mine).counts if mine else Counter()
                if theirs and self._rows(place, theirs).counts - expected:
                    return True
        return False

    def tolerates(self, effect: str) -> bool:
        return self._pattern(effect) is not None

    # -- one relation -----------------------------------------------------------------------------------------------

    def _sides(self, facts: Facts) -> Iterator[tuple[Place, Relation | None, Relation | None]]:
        before, after = dict(_relations(self.baseline)), dict(_relations(facts))
        for place in sorted({*before, *after}):
            mine, theirs = before.get(place), after.get(place)
            if mine is not theirs:
                yield place, mine, theirs

    def _compare(
        self, place: Place, mine: Relation | None, theirs: Relation | None
    ) -> Iterator[tuple[str, str, list[Difference]]]:
        relation = theirs or mine
        assert relation is not None
        expected = self._rows(place, mine) if mine else _Rows(Counter(), {})
        found = self._rows(place, theirs) if theirs else _Rows(Counter(), {})
        path = self._path.get(place, Counter())
        examples = {**expected.examples, **found.examples}
        missing = expected.counts - found.counts
        extra = found.counts - expected.counts
        for view in list(extra):
            fades = relation.ttl is not None and examples[view][relation.ttl] is not None
            if fades and found.counts[view] <= path[view]:
                del extra[view]  # a lock or a mark that was left behind, and ends by itself

        def difference(view: View) -> Difference:
            row = self.describe(relation, examples[view], view)
            return Difference(effect_of(relation, view), row, expected.counts[view], found.counts[view])

        for old, new in _pairs(relation, list(missing.elements()), list(extra.elements())):
            missing -= Counter([old])
            extra -= Counter([new])
            known = not relation.external and new in path
            yield "lost" if known else "changed", effect_of(relation, old), [difference(old), difference(new)]
        for view in extra:
            effect = effect_of(relation, view)
            if view in expected.counts and (pattern := self._pattern(effect)) is not None:
                self.tolerated.add(pattern)
                continue
            unfinished = not relation.external and view not in expected.counts and found.counts[view] <= path[view]
            reused = relation.external and view not in expected.counts and _reuses_key(relation, view, expected.counts)
            kind = "lost" if unfinished else "changed" if reused else "duplicated"
            yield kind, effect, [difference(view)]
        for view in missing:
            yield "lost", effect_of(relation, view), [difference(view)]

    def _rows(self, place: Place, relation: Relation) -> _Rows:
        counts: Counter[View] = Counter()
        examples: dict[View, Row] = {}
        for row in relation.rows:
            view = self.canon.view(place, relation, row)
            counts[view] += 1
            examples.setdefault(view, row)
        return _Rows(counts, examples)

    def _is_tolerated(self, place: Place, relation: Relation) -> bool:
        return self._pattern(place[1].removeprefix("call ")) is not None

    def _pattern(self, effect: str) -> str | None:
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


def effect_of(relation: Relation, view: View) -> str:
    """What a row belongs to, for people: a table, a key, a call."""
    if relation.ttl is not None:
        return "redis " + "".join(repr(leaf) if isinstance(leaf, Hole) else str(leaf) for leaf in view[0])
    return relation.name.removeprefix("call ")


def _text(cell: object, leaves: tuple[object, ...]) -> object:
    if isinstance(cell, str) and any(isinstance(leaf, Hole) for leaf in leaves):
        return "".join(repr(leaf) if isinstance(leaf, Hole) else str(leaf) for leaf in leaves)
    return cell


def _relations(facts: Facts) -> Iterator[tuple[Place, Relation]]:
    for resource, version in facts.items():
        for name, relation in version.relations.items():
            yield (resource, name), relation


def _reuses_key(relation: Relation, view: View, expected: Iterable[View]) -> bool:
    """The key of an expected effect came with another payload, which a receiver refuses or applies on top."""
    if relation.columns[:1] != ("key",) or view[0] == (None,):
        return False
    return any(each[0] == view[0] for each in expected)


def _pairs(relation: Relation, missing: list[View], extra: list[View]) -> Iterator[tuple[View, View]]:
    """A row that is missing and one that is there instead: the same thing with another value."""
    options = sorted(
        (sum(a != b for a, b in zip(old, new, strict=True)), i, j)
        for i, old in enumerate(missing)
        for j, new in enumerate(extra)
        if _same_thing(relation, old, new)
    )
    used: tuple[set[int], set[int]] = (set(), set())
    for _, i, j in options:
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            yield missing[i], extra[j]


def _same_thing(relation: Relation, old: View, new: View) -> bool:
    if relation.ttl is not None:
        return old[:3] == new[:3]  # key, type, field
    drawn = any(isinstance(leaf, Hole) for index in relation.keys for leaf in old[index])
    if relation.keys and not drawn:
        return all(old[index] == new[index] for index in relation.keys)
    alike = sum(a == b for a, b in zip(old, new, strict=True))
    return 2 * alike >= len(old)
