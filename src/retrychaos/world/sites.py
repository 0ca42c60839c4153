"""Which line of the user's code is behind an operation: skips the standard library, installed packages and ourselves.

Called at every boundary, so both the verdict on a file and the finished sites are cached.
"""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
from types import FrameType
from typing import Literal, TypeAlias

from retrychaos.model.step import Site

Origin: TypeAlias = Literal["user", "library", "stdlib", "ours", "harness"]
"""Where code comes from. ``harness`` is our code that calls jobs, ``ours`` our code that jobs call."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CALLED_BY_JOBS = tuple(os.path.join(_PACKAGE, part) + os.sep for part in ("world", "model"))
_TYPED_IN = ("<stdin>", "<doctest", "<ipython", "<console")

_origins: dict[str, Origin] = {}
_shown: dict[str, str] = {}
_sites: dict[tuple[str, int, str], Site] = {}


def _folders(*names: str) -> tuple[str, ...]:
    found = {os.path.realpath(path) for path in names if path} | {os.path.abspath(path) for path in names if path}
    return tuple(path + os.sep for path in found)


_STDLIB = _folders(*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_INSTALLED = _folders(
    *(sysconfig.get_path(name) for name in ("purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages()
)
_INSTALLED_PARTS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def origin(filename: str) -> Origin:
    """Whose code a file holds; `filename` as in ``co_filename``."""
    known = _origins.get(filename)
    if known is None:
        known = _origins[filename] = _classify(filename)
    return known


def _classify(filename: str) -> Origin:
    if filename.startswith("<"):
        # Made by exec: dataclasses, attrs, namedtuple, import machinery; or typed in by a person.
        return "user" if filename.startswith(_TYPED_IN) else "stdlib"
    path = os.path.abspath(filename)
    if path.startswith(_PACKAGE + os.sep):
        return "ours" if path.startswith(_CALLED_BY_JOBS) else "harness"
    if path.startswith(_INSTALLED) or any(part in path for part in _INSTALLED_PARTS):
        return "library"
    return "stdlib" if path.startswith(_STDLIB) else "user"


def user_site(frame: FrameType | None) -> Site | None:
    """The innermost line of user code at or below `frame` on the stack.

    A job that is itself an installed package has no line of user code between the harness and the operation: then the
    innermost line of any installed package counts, not the test that asked for the check.
    """
    library: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _origins.get(filename) or origin(filename)
        if kind == "user":
            return site_of(frame)
        if kind == "library":
            library = library or frame
        elif kind == "harness" and library is not None:
            return site_of(library)
        frame = frame.f_back or _spawner(frame)
    return None if library is None else site_of(library)


def _spawner(frame: FrameType) -> FrameType | None:
    """Where a greenlet was started, in which SQLAlchemy runs what an async engine does."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return None
    parent = greenlet.getcurrent().parent
    return parent.gr_frame if parent is not None and parent.gr_frame is not frame else None


def site_of(frame: FrameType) -> Site:
    """The line that `frame` is at."""
    code = frame.f_code
    key = (code.co_filename, frame.f_lineno, code.co_name)
    known = _sites.get(key)
    if known is None:
        filename, line, function = key
        source = linecache.getline(filename, line, frame.f_globals).strip()
        known = _sites[key] = Site(shown(filename), line, function, source)
    return known


def shown(filename: str) -> str:
    """A file name for people: relative to the working folder if it lies there."""
    known = _shown.get(filename)
    if known is None:
        known = filename
        if not filename.startswith("<"):
            here = os.getcwd() + os.sep
            path = os.path.abspath(filename)
            known = path[len(here) :] if path.startswith(here) else path
        _shown[filename] = known
    return known
