"""Whose doing an effect is: of the job, with the line that did it, or of the interpreter, the test run or a log."""

from __future__ import annotations

import os
from types import FrameType
from typing import NamedTuple

from retrychaos.model.step import Site
from retrychaos.world import calls, interception, sockets
from retrychaos.world.sites import origin, site_of

_TOOLS = frozenset(
    {"_pytest", "pytest", "pytest_cov", "pytest_timeout", "xdist", "execnet", "hypothesis", "coverage", "loguru"}
    | {"debugpy", "pydevd", "_pydevd_bundle", "_pydev_bundle", "_pydevd_frame_eval"}
)
"""Packages whose writes are about the test run or are logs."""
_IMPORTING = frozenset({"importlib._bootstrap_external", "_frozen_importlib_external"})
_PROBES = frozenset({"platform", "uuid", "ctypes.util"})
"""Modules that ask other programs about the machine."""

_LAZY = (
    *("files_hooks", "files_stream", "files", "mail_clients", "sqlite_hooks", "sqlite_seen", "sqlite_turns"),
    *(f"http_{name}" for name in ("aiohttp", "httpx", "requests", "stdlib", "traffic", "urllib3")),
)
"""Not imported here: only who uses them shall load them."""
_SEE_THROUGH = frozenset(module.__file__ for module in (calls, interception, sockets)) | frozenset(
    os.path.join(os.path.dirname(__file__), f"{name}.py") for name in _LAZY
)
"""Our wrappers around functions of others: what happens beneath is not our doing."""


class Context(NamedTuple):
    """Where in the code an effect came from."""

    site: Site | None
    by_user: bool
    """There is a line of user code; `site` may else be one of an installed package."""
    temporary: bool
    """Made by ``tempfile``."""


def context_of(frame: FrameType | None, event: str) -> Context | None:
    """Where an effect came from; None if it is about the interpreter, the test run or a log."""
    temporary = False
    library: FrameType | None = None
    first = True
    while frame is not None:
        kind = origin(frame.f_code.co_filename)
        module = frame.f_globals.get("__name__", "")
        if kind == "stdlib":
            if (first and module in _IMPORTING) or module.partition(".")[0] == "logging":
                return None
            if library is None and _is_probe(module, frame, event):
                return None
            temporary = temporary or (library is None and module == "tempfile")
        elif kind == "user":
            return None if _within_logging(frame) else Context(site_of(frame), True, temporary)
        elif kind == "library":
            if module.partition(".")[0] in _TOOLS:
                return None
            library = library or frame
        elif kind == "harness" and (library is not None or frame.f_code.co_qualname == "Job.__call__"):
            break
        elif library is None and frame.f_code.co_filename not in _SEE_THROUGH:
            return None  # we did it ourselves
        first = False
        frame = frame.f_back
    return Context(site_of(library) if library else None, False, temporary)


def _is_probe(module: str, frame: FrameType, event: str) -> bool:
    if module == "tempfile":
        return frame.f_code.co_name == "_get_default_tempdir"
    return event == "process" and module in _PROBES


def _within_logging(frame: FrameType | None) -> bool:
    """A handler of the user's own, called by logging."""
    while frame is not None:
        kind = origin(frame.f_code.co_filename)
        if kind == "harness":
            return False
        if kind == "stdlib" and frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False
