"""Functions that stand in the place of those of ``os``, ``io`` and ``tempfile`` while a check with files runs.

Outside of a delivery, and for all other paths, each is the original. Each step is told by FilesSource.act().
"""

from __future__ import annotations

import builtins
import glob
import io
import logging
import os
import stat
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from retrychaos.world.files import by_harness
from retrychaos.world.files_locks import lock_hooks
from retrychaos.world.files_stream import digest, is_valid, open_stream

if TYPE_CHECKING:
    from retrychaos.world.files import FilesSource

_SUPPORTS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")
_fstat = os.fstat
_CREATES = os.O_CREAT | os.O_EXCL
_WRITES = os.O_CREAT | os.O_TRUNC
_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_ASKS_TWICE = frozenset({"follow_symlinks", "dir_fd", "src_dir_fd", "dst_dir_fd"})


class Hooks:
    """All replacements: put in place together, and undone together."""

    def __init__(self, source: FilesSource) -> None:
        self.logs = _logs()
        self._source = source
        self._undo: list[tuple[Any, str, Any]] = []
        self._sets: list[tuple[set[Any], Any]] = []
        self._stand_ins: dict[int, tuple[Any, Any]] = {}
        """By identity: an original and what stands for it, and the other way round."""

    def install(self) -> None:
        wanted: list[tuple[Any, str, Any]] = [(builtins, "open", self._open), (io, "open", self._open)]
        wanted += [(os, name, make(self._source, getattr(os, name))) for name, make in _MAKERS if hasattr(os, name)]
        wanted += lock_hooks(self._source)
        for owner, name, function in wanted:
            original = getattr(owner, name)
            if not isinstance(function, types.MethodType):
                # Bound, as a builtin is: it may be an attribute of somebody's class.
                function = types.MethodType(_drop_first(function), original)
            known = self._stand_ins.get(id(original))
            stand_in = known[1] if known is not None else function
            self._stand_ins[id(original)] = (original, stand_in)
            self._set(owner, name, stand_in)
        for owner, name, value in list(_holding({key: pair[0] for key, pair in self._stand_ins.items()})):
            self._set(owner, name, self._stand_ins[id(value)][1])
        self._support()
        for name, value in list(vars(_GLOBBER).items()) if _GLOBBER is not None else ():
            known = self._stand_ins.get(id(getattr(value, "__func__", None)))
            if known is not None:
                self._set(_GLOBBER, name, staticmethod(known[1]))
        sequence: Any = tempfile._RandomNameSequence  # type: ignore[attr-defined]
        self._set(sequence, "__next__", self._next_name(sequence.__next__))

    def uninstall(self) -> None:
        later = {id(stand_in): stand_in for _, stand_in in self._stand_ins.values()}
        originals = {id(stand_in): original for original, stand_in in self._stand_ins.values()}
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)
        for owner, name, value in list(_holding(later)):  # imported meanwhile
            setattr(owner, name, originals[id(value)])
        while self._sets:
            group, stand_in = self._sets.pop()
            group.discard(stand_in)
        self._stand_ins.clear()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _support(self) -> None:
        """Who asks whether a function can do something has to find its stand-in, too."""
        for name in _SUPPORTS:
            group = getattr(os, name)
            for original, stand_in in list(self._stand_ins.values()):
                if original in group:
                    group.add(stand_in)
                    self._sets.append((group, stand_in))

    def _next_name(self, original: Any) -> Any:
        source = self._source

        def __next__(sequence: Any) -> str:
            return source.draw() if source.watching else original(sequence)

        return __next__

    # -- open --------------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> Any:
        source, original = self._source, io.open

        def open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            def plainly() -> Any:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)

            if not source.watching:
                return plainly()
            path = source.place(file, follow=True)
            if path is None or not is_valid(file, mode, buffering, encoding, errors, newline, closefd):
                return plainly()
            if sys._getframe(2).f_globals.get("__name__") == "logging":
                self._note_log(path)
            if path in self.logs:
                return plainly()
            return open_stream(source, path, file, mode, buffering, encoding, errors, newline, closefd, opener)

        return open

    def _note_log(self, path: str) -> None:
        self.logs.add(path)
        self._source.folders.logs.add(path)


def _logs() -> set[str]:
    handlers = [reference() for reference in list(logging._handlerList)]  # type: ignore[attr-defined]
    names = [getattr(handler, "baseFilename", None) for handler in handlers]
    return {os.path.realpath(name) for name in names if isinstance(name, str)}


def _drop_first(function: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return stand_in


_namespace: Any = vars(types.ModuleType)["__dict__"].__get__


def _holding(wanted: dict[int, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Modules that have one of these under any name: ``from os import replace as swap``."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.startswith("retrychaos.") or name in ("posix", "_io", "nt"):
            continue
        for key, value in list(_namespace(module).items()):
            if id(value) in wanted and wanted[id(value)] is value:
                yield module, key, value


_GLOBBER: Any = getattr(glob, "_StringGlobber", None)
"""Python 3.13: what pathlib lists folders with; it has kept functions of os as its own."""

# -- os: paths -------------------------------------------------------------------------------------------------------

_Maker = Callable[["FilesSource", Any], Any]


def _os_open(source: FilesSource, original: Any) -> Any:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        def do() -> int:
            return original(path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]

        full = source.place(path, dir_fd, follow=not flags & os.O_EXCL) if source.watching else None
        if full is None or source.is_log(full) or (_TMPFILE and flags & _TMPFILE == _TMPFILE):
            return do()
        fd = source.act("open", (full,), do, _seen_size, changes=bool(flags & _WRITES))
        source.opening(fd, full)
        if flags & _CREATES == _CREATES:
            source.made(full)
        return fd

    return open


def _change(verb: str, *, gone: bool = False, made: bool = False, follow: bool = False) -> _Maker:
    """A function of one path that changes what is there."""

    def make(source: FilesSource, original: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = source.place(path, kwargs.get("dir_fd"), follow=follow) if source.watching else None
            if where is None or source.is_log(where):
                return original(path, *args, **kwargs)
            done = source.act(
                verb,
                (where,),
                lambda: original(path, *args, **kwargs),
                _nothing,
                changes=True,
            )
            if gone:
                source.moved(where)
            if made:
                source.made(where)
            return done

        return change

    return make


def _pair(verb: str, *, gone: bool) -> _Maker:
    """A function of two paths; what is under the first is gone afterwards, or stays."""

    def make(source: FilesSource, original: Any) -> Any:
        def change(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            def do() -> Any:
                return original(src, dst, *args, **kwargs)

            if not source.watching:
                return do()
            one = source.place(src, kwargs.get("src_dir_fd"))
            two = source.place(dst, kwargs.get("dst_dir_fd"))
            paths = tuple(path for path in (one, two) if path is not None)
            if not paths:
                return do()
            done = source.act(verb, paths, do, _nothing, changes=True, tree=lambda: any(map(os.path.isdir, paths)))
            if gone and one is not None:
                source.moved(one)
            if two is not None:
                source.moved(two)
                source.made(two)
            return done

        return change

    return make


def _symlink(source: FilesSource, original: Any) -> Any:
    def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        def do() -> None:
            original(src, dst, target_is_directory, dir_fd=dir_fd)

        where = source.place(dst, dir_fd) if source.watching else None
        if where is None:
            do()
        else:
            source.folders.links = True
            source.act("symlink", (where,), do, _nothing, changes=True)

    return symlink


def _look(verb: str, see: Callable[[Any], object], follow: bool = False) -> _Maker:
    """A function that looks at what is under a path."""

    def make(source: FilesSource, original: Any) -> Any:
        def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            through = follow and kwargs.get("follow_symlinks", True)
            where = source.place(path, kwargs.get("dir_fd"), follow=through) if source.watching else None
            if where is None or source.is_log(where) or by_harness(2):
                return original(path, *args, **kwargs)
            return source.act(verb, (where,), lambda: original(path, *args, **kwargs), see)

        return look

    return make


def _seen_stat(found: os.stat_result) -> tuple[int, int, int]:
    """Not the times: they are those of the clock. Nor the inode: it has no meaning."""
    return found.st_mode, found.st_nlink, 0 if stat.S_ISDIR(found.st_mode) else found.st_size


def _seen_size(fd: int) -> object:
    return _seen_stat(_fstat(fd))[2]


class _Entries:
    """What os.scandir() returns, read at once, and in the same order every time: that of the disk changes by itself."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self.entries = sorted(entries, key=lambda entry: entry.name)
        self._left = iter(self.entries)

    def seen(self) -> object:
        return [(entry.name, entry.is_symlink(), entry.is_dir()) for entry in self.entries]

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


def _listdir(source: FilesSource, original: Any) -> Any:
    def listdir(path: Any = ".") -> Any:
        where = source.place(path if path is not None else ".", follow=True) if source.watching else None
        if where is None or by_harness(2):
            return original(path)
        source.listed.add(where)
        return source.act("list", (where,), lambda: sorted(original(path)), list)

    return listdir


def _scandir(source: FilesSource, original: Any) -> Any:
    def scandir(path: Any = ".") -> Any:
        where = source.place(path if path is not None else ".") if source.watching else None
        if where is None or by_harness(2):
            return original(path)
        source.listed.add(where)
        return source.act("list", (where,), lambda: _Entries(original(path)), lambda entries: entries.seen())

    return scandir


# -- os: descriptors -------------------------------------------------------------------------------------------------


def _on_fd(verb: str, see: Callable[[Any], object], *, changes: bool) -> _Maker:
    """A function whose first argument is a descriptor."""

    def make(source: FilesSource, original: Any) -> Any:
        def use(fd: int, *args: Any, **kwargs: Any) -> Any:
            opened = source.opened.get(fd) if source.watching else None
            if opened is None or by_harness(2):
                return original(fd, *args, **kwargs)
            return source.act(verb, (opened.path,), lambda: original(fd, *args, **kwargs), see, changes=changes)

        return use

    return make


def _copy(verb: str, out: int, into: int) -> _Maker:
    """From one descriptor to another, in the kernel. `out` and `into` say where they stand among the arguments."""

    def make(source: FilesSource, original: Any) -> Any:
        def copy(*args: Any, **kwargs: Any) -> Any:
            seen = source.watching and len(args) > 1
            target = source.opened.get(args[out]) if seen else None
            origin = source.opened.get(args[into]) if seen else None
            paths = tuple(opened.path for opened in (origin, target) if opened is not None)
            if not paths:
                return original(*args, **kwargs)
            return source.act(
                verb,
                paths,
                lambda: original(*args, **kwargs),
                lambda size: size,
                changes=target is not None,
            )

        return copy

    return make


def _close(source: FilesSource, original: Any) -> Any:
    def close(fd: int) -> None:
        if source.watching and source.gone:
            return None  # closed already from outside, and the number may be somebody else's
        source.opened.pop(fd, None)
        return original(fd)  # type: ignore[no-any-return]

    return close


def _nothing(_: Any) -> None:
    return None


def _itself(value: Any) -> object:
    return value


_MAKERS: tuple[tuple[str, _Maker], ...] = (
    ("open", _os_open),
    ("close", _close),
    ("remove", _change("remove", gone=True)),
    ("unlink", _change("remove", gone=True)),
    ("rmdir", _change("rmdir", gone=True)),
    ("mkdir", _change("mkdir", made=True)),
    ("truncate", _change("truncate", follow=True)),
    ("chmod", _change("chmod", follow=True)),
    ("rename", _pair("rename", gone=True)),
    ("replace", _pair("replace", gone=True)),
    ("link", _pair("link", gone=False)),
    ("symlink", _symlink),
    ("stat", _look("stat", _seen_stat, follow=True)),
    ("lstat", _look("stat", _seen_stat)),
    ("access", _look("access", _itself, follow=True)),
    ("readlink", _look("readlink", _itself)),
    ("listdir", _listdir),
    ("scandir", _scandir),
    ("write", _on_fd("write", _itself, changes=True)),
    ("writev", _on_fd("write", _itself, changes=True)),
    ("pwrite", _on_fd("write", _itself, changes=True)),
    ("pwritev", _on_fd("write", _itself, changes=True)),
    ("ftruncate", _on_fd("truncate", _nothing, changes=True)),
    ("posix_fallocate", _on_fd("allocate", _nothing, changes=True)),
    ("fchmod", _on_fd("chmod", _nothing, changes=True)),
    ("read", _on_fd("read", digest, changes=False)),
    ("pread", _on_fd("read", digest, changes=False)),
    ("fstat", _on_fd("stat", _seen_stat, changes=False)),
    ("sendfile", _copy("copy", out=0, into=1)),
    ("copy_file_range", _copy("copy", out=1, into=0)),
)
