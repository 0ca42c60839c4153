"""A report as text for the terminal: job, what broke, timelines, ledger against baseline, how to replay."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

from retrychaos.model.durations import in_words
from retrychaos.model.report import FAILED, PROVEN, Delivery, Difference, Finding, Report
from retrychaos.model.step import Site

_CAUSES = {
    "duplicated": "an effect happened more often than in the clean run",
    "lost": "an effect of the clean run is missing, and no later delivery makes up for it",
    "changed": "a value differs from that of the clean run",
    "stuck": "no later delivery finishes the job",
    "reordered": "the order of whole, clean runs makes a difference",
}
_KEPT = 4
_WIDTH = 100


def summary_line(report: Report) -> str:
    """One line: verdict, job, guarantee, counts, time."""
    found = ", ".join(f"{finding.kind} {finding.effect}" for finding in report.findings)
    said = found if report.verdict == FAILED else report.guarantee
    return (
        f"{report.verdict:<12} {report.job}: {said} "
        f"[{report.states} states, {report.runs} runs, {report.boundaries} boundaries, {report.seconds:.2f} s]"
    )


def summary_lines(reports: Sequence[Report]) -> list[str]:
    """One line a job and verdict, however often a test checked it (Hypothesis does so with every example)."""
    groups: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        groups.setdefault((report.job, report.verdict), []).append(report)
    lines = []
    for same in groups.values():
        more = f", and {len(same) - 1} more checks" if len(same) > 2 else ", and 1 more check" if len(same) > 1 else ""
        lines.append(summary_line(max(same, key=lambda report: report.states)) + more)
    return lines


def full_text(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"{report.job} is {_said(report)}"
    for finding in report.findings:
        yield ""
        yield from _finding(finding)
    if report.verdict != PROVEN and not report.findings:
        yield ""
        yield f"reason: {report.stop_reason}"
    for note in report.notes:
        yield f"note: {note}"
    for warning in report.warnings:
        yield f"warning: {warning}"
    yield ""
    yield (
        f"{report.states} states, {report.runs} runs, {report.boundaries} boundaries in {report.seconds:.2f} s; "
        f"the clean run has {report.steps} steps"
    )


def _said(report: Report) -> str:
    if report.verdict == FAILED:
        return "not idempotent"
    if report.verdict == PROVEN:
        return f"proven: {report.guarantee}"
    return "neither proven nor refuted (inconclusive)"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.kind.upper()} {finding.effect}: {finding.reason or _CAUSES[finding.kind]}"
    yield ""
    if finding.moments and (len(finding.timeline) > 1 or any(moment.event == "rival" for moment in finding.moments)):
        yield from _side_by_side(finding)
        for delivery in finding.timeline:
            if delivery.job:
                yield from _delivery(delivery)
    else:
        for delivery in finding.timeline:
            yield from _delivery(delivery)
    if finding.differences:
        yield ""
        yield f"  {'ledger':<{_WIDTH - 30}} clean run  this run"
        for difference in finding.differences:
            yield _difference(difference)
    if finding.late:
        yield ""
        yield f"  {finding.late}"
        yield "  Queues deliver a message again for days. Let what protects the work live longer than that, or ask"
        yield "  whether it is done before it is done again; late=False leaves late deliveries out."
    if finding.also_at:
        yield ""
        yield "  the same happens when it dies"
        for place in finding.also_at:
            yield f"    {_cut(place, _WIDTH)}"
        if finding.more_places:
            yield f"    and at {finding.more_places} other places"
    yield ""
    yield f"  replay: pytest --chaos-replay {finding.token}"


def _delivery(delivery: Delivery) -> Iterator[str]:
    after = f", {in_words(delivery.after)} later" if delivery.after else ""
    name = f"{'then ' if delivery.number > 1 else ''}{delivery.job}" if delivery.job else f"delivery {delivery.number}"
    yield f"  {name}{after}"
    steps = delivery.steps
    hidden = len(steps) - 2 * _KEPT - 1
    site: Site | None = None
    faults = 0
    for number, step in enumerate(steps, start=1):
        if step.kind == "fault":
            faults += 1
            yield _cut(f"        !  {step.detail}", _WIDTH)
            continue
        if hidden > 0 and _KEPT < number <= len(steps) - _KEPT:
            if number == _KEPT + 1:
                yield f"         ... {len(steps) - 2 * _KEPT} more steps"
            continue
        if step.site is not None and step.site != site:
            yield _cut(f"    {step.site}  {step.site.source}", _WIDTH)
        site = step.site
        yield _cut(f"      {number - faults:>3}  {step.kind:<6}  {step.detail}", _WIDTH)
    yield f"      {_ENDS[delivery.end]}{': ' + delivery.error if delivery.error else ''}"


def _side_by_side(finding: Finding) -> Iterator[str]:
    """Deliveries that overlap, a column each, from top to bottom in the order of time."""
    columns = _columns(finding)
    count = max(columns.values(), default=0) + 1
    width = max(24, (_WIDTH - 6) // count - 2)
    heads = [
        f"delivery {', then '.join(str(n) for n, at in columns.items() if at == column)}" for column in range(count)
    ]
    yield "    " + "  ".join(f"{head:<{width}}" for head in heads).rstrip()
    site: dict[int, Site | None] = {}
    for moment in finding.moments:
        if moment.event == "rival":
            said = f"{moment.step.kind}: {moment.step.detail}" if moment.step is not None else ""
            yield f"    {'│     ' if said else '├─ '}{_cut(said or f'{moment.detail} runs, whole', _WIDTH)}"
            continue
        if not moment.delivery:
            yield f"    ... {in_words(float(moment.detail))} later ..."
            continue
        column = columns[moment.delivery]
        step = moment.step
        if step is not None and step.site is not None and step.site != site.get(moment.delivery):
            site[moment.delivery] = step.site
            yield _in_column(column, width, f"{os.path.basename(step.site.file)}:{step.site.line} {step.site.source}")
        text = f"  {step.kind}: {step.detail}" if step is not None else f"  {_EVENTS[moment.event]}{moment.detail}"
        yield _in_column(column, width, text)
    for number, column in columns.items():
        if finding.timeline[number - 1].end == "hung":
            yield _in_column(column, width, "  ∞ never gets any further")


def _columns(finding: Finding) -> dict[int, int]:
    """The column of each delivery: one that begins takes the place of one that has ended."""
    columns: dict[int, int] = {}
    live: set[int] = set()
    for moment in finding.moments:
        number = moment.delivery
        if number and number not in columns:
            taken = {columns[other] for other in live}
            columns[number] = next(column for column in itertools.count() if column not in taken)
            live.add(number)
        if moment.event in ("dies", "acknowledged", "raises"):
            live.discard(number)
    return columns


def _in_column(column: int, width: int, text: str) -> str:
    return "    " + " " * (column * (width + 2)) + _cut(text, width)


_EVENTS = {
    "waits": "⧗ waits for the other: ",
    "refused": "! refused: ",
    "fault": "! ",
    "dies": "✗ dies here (SIGKILL)",
    "acknowledged": "✓ returns: acknowledged",
    "raises": "! raises, to be retried: ",
}
_ENDS = {
    "crashed": "  ✗  the process dies here (SIGKILL: no except, no finally runs)",
    "completed": "  ✓  returns: the message is acknowledged",
    "failed": "  !  raises, so it is retried",
    "hung": "  ∞  never ends",
}


def _difference(difference: Difference) -> str:
    sign = "+" if difference.found > difference.expected else "-"
    row = _cut(f"{difference.effect}  {difference.row}", _WIDTH - 34)
    return f"  {sign} {row:<{_WIDTH - 32}} {difference.expected:>9} {difference.found:>9}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
