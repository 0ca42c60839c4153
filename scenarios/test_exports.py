"""Exports: a file that grows, and a cursor beside it which says how far it has grown.

As in test_documents.py one file is one Redis key; ``APPEND`` is what the mode ``"a"`` does.
"""

from __future__ import annotations

from scenarios.conftest import proven, refuted
from scenarios.shop import redis


def arrange() -> None:
    redis.rpush("questions", "a", "b", "c", "d")


def batch(offset: int) -> list[str]:
    return redis.lrange("questions", offset, offset + 1)


def export_by_appending(job: str) -> None:
    offset = int(redis.get(f"offset:{job}") or 0)
    while rows := batch(offset):
        redis.append(f"export:{job}", "".join(f"{row}\n" for row in rows))
        offset += len(rows)
        redis.set(f"offset:{job}", offset)


def export_truncating_first(job: str) -> None:
    offset = int(redis.get(f"offset:{job}") or 0)
    while rows := batch(offset):
        write = redis.append if offset else redis.set  # the first batch begins a new file
        write(f"export:{job}", "".join(f"{row}\n" for row in rows))
        offset += len(rows)
        redis.set(f"offset:{job}", offset)


def export_in_parts(job: str) -> None:
    offset = 0
    while rows := batch(offset):
        redis.hset(f"export:{job}", f"part-{offset}", "".join(f"{row}\n" for row in rows))
        offset += len(rows)


def test_an_export_that_appends(crashing, racing, both):
    """BUG-68 (sensei). "Thirty questions were exported, the progress was a clean 100 %, and the file had 15,090 rows."

    Dead between the rows and the offset: they are appended again. Two at a time: everything is there twice, and the
    offset, which both have *set*, is right. To begin a new file with the first batch helps the first batch. Parts that
    are named by their place can be written by anybody, as often as they like, and need no cursor.
    """
    refuted(crashing, export_by_appending, "7", changed="redis export:7")
    refuted(racing, export_by_appending, "7", changed="redis export:7")

    refuted(crashing, export_truncating_first, "7", changed="redis export:7")
    refuted(racing, export_truncating_first, "7", changed="redis export:7")

    proven(both, export_in_parts, "7")
