"""retrychaos: does a background job survive being delivered at least once?

>>> import retrychaos
>>> with retrychaos.Chaos() as chaos:  # doctest: +SKIP
...     chaos.check(charge_order, order.id)

Names are imported when first used, so that loading the pytest plugin costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrychaos.chaos import Chaos
    from retrychaos.model.errors import (
        BaselineError,
        ChaosError,
        ChaosWarning,
        IdempotencyError,
        OptionError,
        PlanError,
        WorldError,
    )
    from retrychaos.model.plan import Plan
    from retrychaos.model.report import Finding, Report, Run
    from retrychaos.world.http_model import Request, Response

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "Chaos",
    "ChaosError",
    "ChaosWarning",
    "Finding",
    "IdempotencyError",
    "OptionError",
    "Plan",
    "PlanError",
    "Report",
    "Request",
    "Response",
    "Run",
    "WorldError",
]

_HOMES = {
    "Chaos": "retrychaos.chaos",
    "Plan": "retrychaos.model.plan",
    "Finding": "retrychaos.model.report",
    "Report": "retrychaos.model.report",
    "Run": "retrychaos.model.report",
    "Request": "retrychaos.world.http_model",
    "Response": "retrychaos.world.http_model",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'retrychaos' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "retrychaos.model.errors")), name)
