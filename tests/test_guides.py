"""Every example of the guides in docs/ is run as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```", re.S)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_examples_pass(pytester: pytest.Pytester, guide: Path) -> None:
    text = guide.read_text()
    examples = dict(EXAMPLE.findall(text))
    assert examples and len(examples) == text.count("```python"), "every block of Python is an example"
    for name, code in examples.items():
        pytester.path.joinpath(name).write_text(code)
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:randomly", "--chaos-budget=60")
    assert result.ret == 0, result.stdout.str()
    assert result.parseoutcomes()["passed"] == sum(code.count("def test_") for code in examples.values())
