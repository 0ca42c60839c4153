"""What a check raises. Every message says what happened, why it matters and how to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrychaos.model.report import Report


class ChaosError(Exception):
    """A check could not be done as asked (misuse, no baseline, a world that cannot be restored)."""


class OptionError(ChaosError, ValueError):
    """An option is unknown or has a value of the wrong type."""


class BaselineError(ChaosError):
    """The clean run failed, never ended, or had no effect: there is nothing to compare with."""


class WorldError(ChaosError):
    """A resource cannot be snapshotted or restored safely, so the check refuses to touch it."""


class SharingError(WorldError):
    """A part of the world cannot be used by two deliveries at once in this process."""


class SharedError(ChaosError):
    """A delivery beside others came upon a resource that all of them have; it has to be done alone. Not for users."""


class LateError(ChaosError):
    """A job has asked for a part of the world that was not watched: the check begins anew, with it. Not for users."""


class PlanError(ChaosError, ValueError):
    """A token is damaged, of another version, of another job, or no longer fits the job."""


class IdempotencyError(AssertionError):
    """The job is not safe to deliver more than once, or the check could not tell.

    ``report`` is the whole :class:`~retrychaos.Report`.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class ChaosWarning(UserWarning):
    """A check passed, but says less than it could: a budget ran out, a tolerance was not needed."""
