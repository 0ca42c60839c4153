"""pytest's hooks, the fixture ``chaos`` and the marker ``idempotent``. Imports the rest only when a check runs."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from retrychaos.chaos import Chaos
    from retrychaos.model.report import Report

_OPTIONS = {
    "crashes": 'any, or the most crashes of one message (default: "any"; 0 turns them off)',
    "budget": "seconds that one check may take (default: 30)",
    "tolerate": "effects that may happen more than once, separated by commas",
    "volatile": "cells that are not compared, such as jobs.attempts, separated by commas",
    "isolation": '"sample" or "process": run some or all deliveries in forked processes (default: "sample")',
    "scratch": "addresses of real servers whose data a check may rewind, separated by commas",
    "duplicates": "1: two deliveries at the same time are not in this version yet",
    "faults": "false: errors and lost replies are not in this version yet",
    "late": "false: redelivery after an expiry is not in this version yet",
}
_PROPERTY = "retrychaos"
_MARK = "idempotent"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("retrychaos", "crash testing of background jobs")
    for name, text in _OPTIONS.items():
        group.addoption(f"--chaos-{name}", dest=f"chaos_{name}", default=None, metavar=name.upper(), help=text)
        kind: Any = "linelist" if name in ("tolerate", "volatile", "scratch") else None
        parser.addini(f"chaos_{name}", help=text, type=kind, default=None)
    group.addoption(
        "--chaos-replay",
        dest="chaos_replay",
        default=None,
        metavar="TOKEN",
        help="perform only the plan of this token, for the job that it belongs to",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "idempotent(job=None, *, args=(), kwargs=None, **options): check that the job (or the test itself) leaves the "
        "same world however often it crashes and is delivered again. args may be a function of fixtures.",
    )


# -- fixture --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Iterator[Chaos]:
    """Checks background jobs: ``chaos.check(job, *args)``. See the README."""
    made = _make(request.node)
    request.node.stash[_chaos] = made
    with made:
        yield made


_chaos: pytest.StashKey[Chaos] = pytest.StashKey()


def _make(item: pytest.Item) -> Chaos:
    from retrychaos.chaos import Chaos
    from retrychaos.model.errors import OptionError
    from retrychaos.model.options import from_text

    config = item.config
    try:
        made = Chaos()
        for name in _OPTIONS:
            if value := config.getini(f"chaos_{name}"):
                text = "\n".join(value) if isinstance(value, list) else value
                made = made(**{name: from_text(name, text)})
        made = made(**_mark_options(item))
        for name in _OPTIONS:
            text = config.getoption(f"chaos_{name}")
            if text is not None:
                made = made(**{name: from_text(name, text)})
    except OptionError as problem:
        raise pytest.UsageError(str(problem)) from None
    made.replay = config.getoption("chaos_replay")
    return made


# -- marker ---------------------------------------------------------------------------------------------------------


def _mark_options(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return {}
    return {name: value for name, value in mark.kwargs.items() if name not in ("args", "kwargs")}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A mark that names a job checks it before the body runs; a bare mark makes the body the job."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return (yield)
    own = pyfuncitem.stash.get(_chaos, None)
    checker = own or _make(pyfuncitem)
    try:
        if mark.args:
            _check_named(pyfuncitem, mark, checker)
            return (yield)
        _check_body(pyfuncitem, checker)
        # The check has run the body; the hook's other implementations must not run it again.
        pyfuncitem.obj = _done
        return (yield)
    finally:
        if own is None:
            _record(pyfuncitem, checker.reports)
            checker.close()


def _done(**funcargs: Any) -> None:
    """Stands in for a body that the check has already run."""


def _check_named(item: pytest.Function, mark: pytest.Mark, checker: Chaos) -> None:
    __tracebackhide__ = True
    if len(mark.args) > 1:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark idempotent takes one job; pass its arguments as args=(...) and kwargs={{...}}."
        )
    job = mark.args[0]
    if not callable(job):
        raise pytest.UsageError(
            f"{item.nodeid}: the mark idempotent takes a job to call, and {job!r} is not callable. Write "
            "@pytest.mark.idempotent(charge_order, args=(1,))."
        )
    args = _arranged(item, mark.kwargs.get("args", ()))
    kwargs = _arranged(item, mark.kwargs.get("kwargs") or {})
    if not isinstance(args, tuple | list):
        raise pytest.UsageError(f"{item.nodeid}: args must be a tuple, not {args!r}. Write args=({args!r},).")
    checker.check(job, *args, **kwargs)


def _arranged(item: pytest.Function, value: Any) -> Any:
    """A payload may be a function of fixtures, for ids that are known only when they have run."""
    if not callable(value):
        return value
    names = list(inspect.signature(value).parameters)
    missing = [name for name in names if name not in item.funcargs]
    if missing:
        raise pytest.UsageError(
            f"{item.nodeid}: args of the mark idempotent wants the fixtures {missing}, which the test does not use. "
            f"Add them to the test's parameters; it has {sorted(item.funcargs)}."
        )
    return value(**{name: item.funcargs[name] for name in names})


def _check_body(item: pytest.Function, checker: Chaos) -> None:
    __tracebackhide__ = True
    names = item._fixtureinfo.argnames
    funcargs = {name: item.funcargs[name] for name in names}
    checker._check(item.nodeid.replace("::", "."), item.obj, (), funcargs)


# -- reports --------------------------------------------------------------------------------------------------------


def _record(item: pytest.Item, reports: list[Report]) -> None:
    """Onto the item's properties: they reach the controller of xdist, and JUnit files."""
    from retrychaos.report.text import summary_line

    for report in reports:
        item.user_properties.append((_PROPERTY, summary_line(report)))
    reports.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if call.when == "call":
        made = item.stash.get(_chaos, None)
        if made is not None:
            _record(item, made.reports)
    report = yield
    if call.excinfo is not None and call.when == "call":
        from retrychaos.model.errors import IdempotencyError

        if isinstance(call.excinfo.value, IdempotencyError):
            report.longrepr = _failure(item, call.excinfo)
    return report


def _failure(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """The report instead of a traceback through the harness: plain text survives xdist."""
    own = [entry for entry in excinfo.traceback if str(entry.path) == str(item.path)]
    where = f"{item.location[0]}:{own[-1].lineno + 1}: " if own else ""
    return f"{where}{excinfo.value}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if lines:
        terminalreporter.section("retrychaos")
        for line in sorted(lines, key=lambda line: line.split(None, 1)[1]):
            terminalreporter.write_line(line)
