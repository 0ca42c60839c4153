"""The jobs of these tests are about the face of the plugin, and most are not meant to be right where deliveries
overlap."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_delivery_at_a_time(request: pytest.FixtureRequest) -> None:
    """Unless a test, a mark or a flag says otherwise; a test that writes an ini file says it there."""
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester").makeini("[pytest]\nchaos_duplicates = 1\n")
