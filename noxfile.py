"""The tests on other Pythons, where they are installed. ``nox`` runs all sessions; the README's command covers 3.11.

Those marked ``long`` are left out: they ask whether the search is right, which no Python changes.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.stop_on_first_error = True  # what is printed last is what failed


def interpreter(version: str) -> str:
    """Where pyenv keeps that Python, if it does; its own commands only work for the version in use."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else version


@nox.session(python=[interpreter("3.12"), interpreter("3.13")])
def tests(session: nox.Session) -> None:
    session.install("-q", "-e", ".[test]")
    session.run("pytest", "-q", "-n", "2", "-m", "not long", "tests", "scenarios", *session.posargs)


@nox.session(python="3.11", default=False)
def oldest(session: nox.Session) -> None:
    """The lowest versions of the libraries that the package says it works with."""
    session.install("-q", "-e", ".[test]")
    session.install(
        "-q", "pytest==8.4.0", "sqlalchemy==2.0.0", "redis==5.3.0", "fakeredis[lua]==2.36.0", "asyncpg==0.29.0"
    )
    session.run("pytest", "-q", "-n", "2", "tests", "scenarios", *session.posargs)
