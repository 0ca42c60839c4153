"""The tests on other Pythons, where they are installed. ``nox`` runs all sessions; the README's command covers 3.11."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"


@nox.session(python=["3.12", "3.13"])
def tests(session: nox.Session) -> None:
    session.install("-q", "-e", ".[test]")
    session.run("pytest", "-q", "-n", "2", "tests", "scenarios", *session.posargs)


@nox.session(python="3.11", default=False)
def oldest(session: nox.Session) -> None:
    """The lowest versions of the libraries that the package says it works with."""
    session.install("-q", "-e", ".[test]")
    session.install("-q", "pytest==8.4.0", "sqlalchemy==2.0.0", "redis==5.3.0", "fakeredis[lua]==2.36.0")
    session.run("pytest", "-q", "-n", "2", "tests", "scenarios", *session.posargs)
