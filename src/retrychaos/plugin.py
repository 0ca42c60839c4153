"""pytest's hooks, the fixture ``chaos`` and the marker ``idempotent``. Imports the rest only when a check runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
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
    "leases": "columns that say when a claim ends (jobs.locked_until), or when it was made and how long it lasts "
    "(jobs.started_at+5m), separated by commas",
    "isolation": '"sample" or "process": run some or all deliveries in forked processes (default: "sample")',
    "scratch": "addresses of real servers whose data a check may rewind, separated by commas",
    "duplicates": "deliveries of the message that are alive at the same time, at most; 1 turns that off",
    "faults": "errors, lost replies and shutdowns at every step of the first delivery (default: true)",
    "profile": '"default", or "thorough": faults in every delivery, and more time for those that overlap',
    "order": "true: it is a fault if the order of siblings makes a difference (default: false)",
    "late": "true: deliver also after each expiry, such as a time to live in Redis; slow: workers are as slow, too",
}
_IN_CODE_ONLY = ("rivals", "siblings", "then")
"""Options that hold functions. They are known here only to say so, if somebody writes them in an ini file or a flag."""
_PROPERTY = "retrychaos"


def _where_output_goes() -> list[os.stat_result]:
    found = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            found.append(os.fstat(descriptor))
    return found


_OUTPUT = _where_output_goes()
"""Before pytest captures it. Under xdist the controller writes there while the job runs."""
_MARK = "idempotent"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("retrychaos", "crash testing of background jobs")
    for name, text in _OPTIONS.items():
        group.addoption(f"--chaos-{name}", dest=f"chaos_{name}", default=None, metavar=name.upper(), help=text)
        kind: Any = "linelist" if name in ("tolerate", "volatile", "leases", "scratch") else None
        parser.addini(f"chaos_{name}", help=text, type=kind, default=None)
    for name in _IN_CODE_ONLY:
        group.addoption(f"--chaos-{name}", dest=f"chaos_{name}", default=None, help=argparse.SUPPRESS)
        parser.addini(
            f"chaos_{name}", help="takes functions, so only in the test: the fixture or the mark", default=None
        )
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
    _check_settings(config)
    if config.getoption("chaos_replay") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Replayed(config), "retrychaos-replayed")


def _check_settings(config: pytest.Config) -> None:
    """Mistakes in ini files and flags are told before the first test, not once a test."""
    token = config.getoption("chaos_replay")
    names = (*_OPTIONS, *_IN_CODE_ONLY)
    written = {name: text for name in names if (text := _ini_text(config, name)) is not None}
    flags = {name: text for name in names if (text := config.getoption(f"chaos_{name}")) is not None}
    if not written and not flags and token is None:
        return
    from retrychaos.model.errors import OptionError, PlanError
    from retrychaos.model.options import Options, from_text
    from retrychaos.model.plan import read

    for place, texts in (("in the ini file, chaos_{}", written), ("--chaos-{}", flags)):
        for name, text in texts.items():
            try:
                Options().with_changes({name: from_text(name, text)})
            except OptionError as problem:
                raise pytest.UsageError(f"{place.format(name)}: {problem}") from None
    if token is not None:
        try:
            read(token)  # whose job it is, is a question for later
        except PlanError as problem:
            raise pytest.UsageError(f"--chaos-replay: {problem}") from None


def _ini_text(config: pytest.Config, name: str) -> str | None:
    value = config.getini(f"chaos_{name}")
    if not value:
        return None
    return "\n".join(value) if isinstance(value, list) else str(value)


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
            if (text := _ini_text(config, name)) is not None:
                made = made(**{name: from_text(name, text)})
        made = made(**_mark_options(item))
        for name in _OPTIONS:
            text = config.getoption(f"chaos_{name}")
            if text is not None:
                made = made(**{name: from_text(name, text)})
    except OptionError as problem:
        raise pytest.UsageError(f"{item.nodeid}: {problem}") from None
    made.streams += _OUTPUT
    made.replay = config.getoption("chaos_replay")
    if made.replay is not None:
        made.belongs = item.stash[_sought] = _Sought(made.replay)
    return made


class _Sought:
    """With --chaos-replay: which job a token belongs to, and whether a test has come to it."""

    def __init__(self, token: str) -> None:
        self._mark = token.split(".")[1]
        self.found = False
        self.others: list[str] = []

    def __call__(self, job: str) -> bool:
        from retrychaos.model.plan import job_mark

        mine = job_mark(job) == self._mark
        self.found = self.found or mine
        if not mine:
            self.others.append(job)
        return mine


_sought: pytest.StashKey[_Sought] = pytest.StashKey()


def _skip_if_other(item: pytest.Item) -> None:
    """A test that checks only other jobs than that of the token has shown nothing, whether it passed or failed."""
    __tracebackhide__ = True
    sought = item.stash.get(_sought, None)
    if sought is not None and sought.others and not sought.found:
        pytest.skip(f"--chaos-replay: the token belongs to another job than {', '.join(dict.fromkeys(sought.others))}")


# -- marker ---------------------------------------------------------------------------------------------------------


def _mark_options(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return {}
    return {name: value for name, value in mark.kwargs.items() if name not in ("job", "args", "kwargs")}


def _job_of(mark: pytest.Mark) -> Any:
    """The job that a mark names, or None if it is bare."""
    return mark.args[0] if mark.args else mark.kwargs.get("job")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A mark that could not be honoured is an error, before any fixture runs: nothing is left unchecked silently."""
    __tracebackhide__ = True
    mark = item.get_closest_marker(_MARK)
    if mark is not None:
        problem = _misuse(item, mark)
        if problem:
            raise pytest.UsageError(f"{item.nodeid}: {problem}")


def _misuse(item: pytest.Item, mark: pytest.Mark) -> str:
    """What is wrong with a mark, and how to do it right; empty if all is well."""
    if not isinstance(item, pytest.Function) or _is_unittest(item):
        return (
            "the mark idempotent works on test functions and on methods of plain classes, and this is none "
            f"({type(item).__name__}), so it would not be checked. In a unittest.TestCase write: "
            "with retrychaos.Chaos() as chaos: chaos.check(job, ...)."
        )
    if sum(each.name == _MARK for each in item.own_markers) > 1:
        return (
            "it has several marks idempotent, of which only one would be checked. Use the fixture instead: "
            "chaos.check(first, ...); chaos.check(second, ...)."
        )
    if len(mark.args) > 1 or (mark.args and "job" in mark.kwargs):
        return "the mark idempotent takes one job; pass its arguments as args=(...) and kwargs={...}."
    job = _job_of(mark)
    if mark.args or "job" in mark.kwargs:
        if not callable(job):
            return (
                f"the mark idempotent takes a job to call, and {job!r} is not callable. Write "
                "@pytest.mark.idempotent(charge_order, args=(1,))."
            )
    else:
        if problem := _bare_misuse(item, mark):
            return problem
    return _option_misuse(item)


def _bare_misuse(item: pytest.Function, mark: pytest.Mark) -> str:
    if "args" in mark.kwargs or "kwargs" in mark.kwargs:
        return "args and kwargs are for a job that the mark names; a bare mark checks the test with its fixtures."
    if hasattr(item.obj, "hypothesis"):
        return (
            "a bare mark idempotent would make Hypothesis' whole search the job. Use the fixture, so that each example "
            "is checked: chaos.check(job, ...)."
        )
    body = inspect.unwrap(item.obj)
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        return (
            "the test is async, and what calls it is a plugin of its own, so a bare mark idempotent cannot make it the "
            "job. Let the mark name an async job, @pytest.mark.idempotent(charge, args=(1,)), or use chaos.check(job)."
        )
    return ""


def _option_misuse(item: pytest.Item) -> str:
    from retrychaos.model.errors import OptionError
    from retrychaos.model.options import Options

    try:
        Options().with_changes(_mark_options(item))
    except OptionError as problem:
        return f"{problem} The mark also takes args=(...) and kwargs={{...}} for the job that it names."
    return ""


def _is_unittest(item: pytest.Function) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(item.cls, type) and issubclass(item.cls, unittest.TestCase)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A mark that names a job checks it before the body runs; a bare mark makes the body the job."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker(_MARK)
    own = pyfuncitem.stash.get(_chaos, None)
    checker = own
    try:
        if mark is not None:
            checker = own or _make(pyfuncitem)
            if _job_of(mark) is not None:
                _check_named(pyfuncitem, mark, checker)
            else:
                _check_body(pyfuncitem, checker)
                # The check has run the body; the hook's other implementations must not run it again.
                pyfuncitem.obj = _done
        result = yield
    except (Exception, pytest.fail.Exception):
        _skip_if_other(pyfuncitem)
        raise
    finally:
        if own is None and checker is not None:
            _record(pyfuncitem, checker.reports)
            checker.close()
    _skip_if_other(pyfuncitem)
    return result


def _done(**funcargs: Any) -> None:
    """Stands in for a body that the check has already run."""


def _check_named(item: pytest.Function, mark: pytest.Mark, checker: Chaos) -> None:
    __tracebackhide__ = True
    args = _arranged(item, mark.kwargs.get("args", ()))
    kwargs = _arranged(item, mark.kwargs.get("kwargs") or {})
    if not isinstance(args, tuple | list):
        raise pytest.UsageError(f"{item.nodeid}: args must be a tuple, not {args!r}. Write args=({args!r},).")
    if not isinstance(kwargs, dict):
        raise pytest.UsageError(f"{item.nodeid}: kwargs must be a dict, not {kwargs!r}. Write kwargs={{'name': 1}}.")
    checker.check(_job_of(mark), *args, **kwargs)


def _arranged(item: pytest.Function, value: Any) -> Any:
    """A payload may be a function of fixtures, for ids that are known only when they have run."""
    __tracebackhide__ = True
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
    from retrychaos.report.text import summary_lines

    item.user_properties += [(_PROPERTY, line) for line in summary_lines(reports)]
    reports.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    made = item.stash.get(_chaos, None)
    if made is not None and made.reports:
        _record(item, made.reports)
    report = yield
    if call.excinfo is not None and _is_ours(call.excinfo):
        _shorten(report, item, call.excinfo)
    return report


def _is_ours(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    error = excinfo.value
    if isinstance(error, pytest.UsageError):
        return str(excinfo.traceback[-1].path) == __file__
    return type(error).__module__ == "retrychaos.model.errors"


def _shorten(report: Any, item: pytest.Item, excinfo: Any) -> None:
    """The message instead of a traceback through the harness, and the line of the test that asked for it."""
    error = excinfo.value
    short = excinfo.getrepr(style="value", chain=False)
    own = [entry for entry in excinfo.traceback if str(entry.path) == str(item.path)]
    line = own[-1].lineno if own else item.location[1]
    where = item.location[0] if line is None else f"{item.location[0]}:{line + 1}"
    text = "\n".join([f"{where}: {error}", *getattr(error, "__notes__", ())])
    short.reprtraceback.reprentries[-1].lines = text.splitlines()
    if short.reprcrash is not None:
        short.reprcrash.message = str(error)
    report.longrepr = short


class _Replayed:
    """With --chaos-replay: a run in which the token's job was never checked must not look like a success."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._done = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done = self._done or any(name == _PROPERTY for name, _ in report.user_properties)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        if not self._done and session.exitstatus == pytest.ExitCode.OK and not self._config.option.collectonly:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        yield

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._done and not self._config.option.collectonly:
            terminalreporter.section("retrychaos", red=True)
            terminalreporter.write_line(
                f"--chaos-replay {self._config.getoption('chaos_replay')}: no test of this run checks the job of that "
                "token. Run the test that the token came from."
            )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    longest: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "user_properties"):  # those of later phases hold what earlier ones had
                lines = [str(value) for name, value in report.user_properties if name == _PROPERTY]
                longest[report.nodeid] = max(longest.get(report.nodeid, []), lines, key=len)
    lines = [line for each in longest.values() for line in each]
    if lines:
        terminalreporter.section("retrychaos")
        for line in sorted(lines, key=lambda line: line.split(None, 1)[1]):
            terminalreporter.write_line(line)
