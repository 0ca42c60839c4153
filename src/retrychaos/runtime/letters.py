"""Texts that are made of letters drawn one by one, as codes and names of temporary files are.

What such a text is made of says little: one in ten of `choices(ascii_lowercase + digits, k=8)` has no digit. So what
was drawn is kept, instead of guessing by the looks of two samples.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable
from typing import Any

from retrychaos.runtime.patching import Replacement

SHORTEST = 4
"""Letters that are taken for a text when they were drawn by one call."""
_MOST = 2_000
"""Letters drawn one at a time that are kept of one delivery: whoever draws more fills a database."""
_OF_CLASS = ("choice", "choices", "sample")


class Letters:
    """What was drawn, from `start` until `stop`, in the thread that `thread` says."""

    def __init__(self, thread: Callable[[], int]) -> None:
        self.words: set[str] = set()
        """Letters that were drawn by one call."""
        self.streams: list[str] = []
        """Letters that were drawn one at a time, one after the other in one delivery."""
        self.heard = True
        """A delivery draws, and not somebody else."""
        self._thread = thread
        self._open = False
        """The last stream goes on."""

    def replacements(self) -> list[Replacement]:
        modules: list[tuple[Any, str, Any]] = [(random, name, vars(random)["_inst"]) for name in _OF_CLASS]
        modules.append((secrets, "choice", vars(secrets)["_sysrand"]))
        return [
            *((random.Random, name, self._noting(name)) for name in _OF_CLASS),
            *((module, name, _calling(generator, name)) for module, name, generator in modules),
        ]

    def part(self) -> None:
        """What is drawn next has nothing to do with what was drawn last."""
        self._open = False

    def learn(self, words: set[str], streams: list[str]) -> None:
        """What was drawn in another process, which may have begun with what was known here."""
        self.part()
        known = set(self.streams)
        self.words |= words
        self.streams += [stream for stream in streams if stream not in known]

    def _noting(self, name: str) -> Callable[..., Any]:
        real = vars(random.Random)[name]

        def draw(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
            drawn = real(generator, *args, **kwargs)
            if self.heard and threading.get_ident() == self._thread():
                self._note(drawn)
            return drawn

        return draw

    def _note(self, drawn: Any) -> None:
        if isinstance(drawn, str):
            if len(drawn) == 1:
                self._add(drawn)
        elif (
            isinstance(drawn, list)
            and len(drawn) >= SHORTEST
            and all(isinstance(each, str) and len(each) == 1 for each in drawn)
        ):
            word = "".join(drawn)
            if not word.isdigit():  # their looks say enough
                self.words.add(word)

    def _add(self, letter: str) -> None:
        if not self._open:
            self.streams.append("")
            self._open = True
        if len(self.streams[-1]) < _MOST:
            self.streams[-1] += letter


def _calling(generator: random.Random, name: str) -> Callable[..., Any]:
    """The function of a module, which is bound to a method as that was when the module was imported."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        return getattr(generator, name)(*args, **kwargs)

    return draw
