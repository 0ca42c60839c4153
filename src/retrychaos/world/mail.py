"""Mail: what a job hands to an SMTP server is an effect outside, which nothing can take back.

Source and resource in one. Clients (mail_clients.py) reach a mailbox in memory instead of a server; a server of the
test's own on this machine is reached, and what it accepts counts as well.
"""

from __future__ import annotations

import errno
import fnmatch
import importlib.machinery
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.model.plan import ERROR, LOST_REPLY
from retrychaos.model.values import short
from retrychaos.world.calls import Calls
from retrychaos.world.mailbox import COLUMNS, Mail, Mailbox
from retrychaos.world.resource import Blob, Plain, Stage

NAME: Final = "mail"
_CLIENTS: Final = ("smtplib", "aiosmtplib")


class Mails(Plain):
    """Everything that was accepted."""

    name = NAME
    label = "mail"
    alone = ""

    def __init__(self, stage: Stage, mailbox: Mailbox, calls: Calls | None = None) -> None:
        self.stage = stage
        self._calls = calls
        self.mailbox = mailbox
        self.commits = 0
        self._rows: tuple[Row, ...] = ()
        self._log: list[Mail] = []
        self._last: list[Mail] = []
        """What arrived in the delivery that has ended last."""
        self._tolerated = any(fnmatch.fnmatchcase(NAME, pattern) for pattern in stage.options("tolerate"))
        self._usual: Counter[Row] | None = None
        """What arrives in the clean run, once that is over."""
        self._relations: dict[tuple[Row, ...], Relation] = {}
        self._undo: list[Callable[[], None]] = []
        self._elsewhere = False
        """A server of the test's own was reached."""
        self.version = self._of(())

    # -- Source ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Hook the clients that are imported, and others when they are."""
        if self._undo:
            return
        for client in _CLIENTS:
            if client in sys.modules:
                self._hook(client)
            else:
                self._undo.append(_when_imported(client, self._hook))

    def _hook(self, client: str) -> None:
        import smtplib  # noqa: F401  # first, for it is hooked as soon as somebody imports it

        from retrychaos.world import mail_clients

        hook = mail_clients.hook_smtplib if client == "smtplib" else mail_clients.hook_aiosmtplib
        self._undo.append(hook(self))

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """What has arrived is in the memory of the process."""

    def end_delivery(self) -> Any:
        """Called twice for one delivery: as a source, and as a resource with no notes to give."""
        if self._log:
            self._last, self._log = self._log, []
        return ()

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def leave(self, owner: object) -> None:
        """A server forgets a connection that is gone, and what was not complete on it."""

    # -- for clients -------------------------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        return self.stage.running

    @property
    def _covered(self) -> bool:
        """Inside a watched call, whose declaration says what counts."""
        return self._calls is not None and self._calls.inside(threading.get_ident())

    def accept(self, mail: Mail, faults: bool = True) -> None:
        """A step: the boundary, and then the mail has arrived.

        faults: the client makes its own error of what is raised when a line breaks; only smtplib does.
        """
        self.before(mail.recipients, mail.subject)
        if faults:
            self.stage.strike(ERROR, _broken)
        self.after(mail)
        if faults:
            self.stage.strike(LOST_REPLY, _broken)

    def before(self, recipients: Sequence[str], subject: str) -> None:
        if self._covered:
            return
        if self.stage.find(NAME) is None:
            self.stage.adopt(self)
        detail = f"mail to {', '.join(recipients)}: {short(subject, 60)}"
        self.stage.step("mail", self, "mail", detail)

    def after(self, mail: Mail) -> None:
        self._log.append(mail)
        if self._covered:
            return
        if self._counts(mail.row):
            self._rows = (*self._rows, mail.row)
        self.commits += 1
        self.stage.touched(self)
        self.stage.observed("accepted")

    def _counts(self, row: Row) -> bool:
        """Whether one more makes a difference.

        Where more than in the clean run are tolerated, twice as many stand for any number: no job can see how many
        there are, and each number would make a state of its own.
        """
        if not self._tolerated or self._usual is None:
            return True
        return self._rows.count(row) < 2 * max(1, self._usual[row])

    def reach(self, host: str, port: int) -> None:
        """A server of the test's own is about to be spoken to."""
        self.stage.keep_off(f"the mail server at {host}:{port}")
        self._elsewhere = True
        self.stage.claim_address((host, port))

    def clean_run_done(self) -> None:
        """The clean run has ended: what arrived in it is what the test may look at."""
        self.mailbox.take(self._last)
        self._usual = Counter(mail.row for mail in self._last)

    # -- Resource ----------------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        return not self._elsewhere

    def refresh(self) -> Version:
        if self._rows != self.version.relations[NAME].rows:
            self.version = self._of(self._rows)
        return self.version

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> Blob:
        return self._rows, self._usual

    def restore(self, version: Version, blob: Blob) -> None:
        self._rows, usual = blob
        self._usual = self._usual or usual  # a fork has not seen the clean run
        self._log, self._last = [], []
        self.version = version

    def _of(self, rows: tuple[Row, ...]) -> Version:
        known = self._relations.get(rows)
        if known is None:
            known = self._relations[rows] = Relation(NAME, COLUMNS, rows, external=True)
        return Version({NAME: known})

    def shift(self, seconds: float) -> None:
        """Mails have no clock."""

    def land(self, ahead: float) -> None:
        """What has arrived stays."""

    def shift_ids(self, by: int) -> None:
        """A mailbox draws no ids."""

    def holds(self, owner: object) -> str:
        return ""

    def distrust(self) -> None:
        """What has arrived is known from the clients themselves."""

    def close(self) -> None:
        self.uninstall()
        self._relations.clear()


class _Finder:
    """Stands first among the finders of modules, and calls back when one was imported."""

    def __init__(self, name: str, then: Callable[[str], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(name, path, target) if finder is not self else None
            if found is not None and found.loader is not None:
                self._follow(found.loader)
                return found
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                self._then(self._name)

        loader.exec_module = exec_module


def _when_imported(name: str, then: Callable[[str], None]) -> Callable[[], None]:
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return undo


def _broken() -> OSError:
    """What a socket raises; smtplib says SMTPServerDisconnected."""
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
