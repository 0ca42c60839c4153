"""What all tests of this repository share."""

from __future__ import annotations

pytest_plugins = ["pytester"]
