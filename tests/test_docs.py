"""Every example of the README and of docs/ is run as a newcomer would run it, and its output is the real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```", re.S)
OUTPUT = re.compile(r"<!-- output: (\S+) -->\n```text\n(.*?)```", re.S)
EXAMPLES = dict(EXAMPLE.findall(README))
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
OUTPUTS = dict(OUTPUT.findall(README))


def steady(text: str) -> list[str]:
    """Without times, which differ from run to run."""
    return [re.sub(r"\d+\.\d\d s\b", "0.00 s", line.rstrip()) for line in text.strip().splitlines()]


RUN = {name: code for name, code in EXAMPLES.items() if name not in OUTPUTS}
RUN |= {f"{page}/{name}": code for page, text in PAGES.items() for name, code in EXAMPLE.findall(text)}


@pytest.mark.parametrize("name", RUN)
def test_examples_pass(pytester: pytest.Pytester, name: str) -> None:
    pytester.path.joinpath(name.rpartition("/")[2]).write_text(RUN[name])
    result = pytester.runpytest_subprocess(
        "-W", "error", "-p", "no:randomly", "--chaos-budget=60"
    )  # on a busy machine, too
    assert result.ret == 0, result.stdout.str()
    assert result.parseoutcomes()["passed"] == RUN[name].count("def test_")


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_is_the_real_one(pytester: pytest.Pytester, name: str) -> None:
    pytester.path.joinpath(name).write_text(EXAMPLES[name])
    result = pytester.runpytest_subprocess("-p", "no:randomly", "--chaos-budget=60")
    text = result.stdout.str()
    start = text.index(f"{name}:")
    end = text.index("the clean run has", start)
    assert steady(OUTPUTS[name]) == steady(text[start : text.index("\n", end)])


def test_every_block_of_python_is_an_example() -> None:
    assert README.count("```python") == len(EXAMPLES) > 2
    assert set(OUTPUTS) <= set(EXAMPLES)
    assert PAGES
    for name, page in PAGES.items():
        assert page.count("```python") == len(EXAMPLE.findall(page)) > 0, name


def test_options_are_documented_and_no_others() -> None:
    from retrychaos.model.options import NAMES

    table = README[README.index("| option | meaning |") : README.index("They can be given in a call")]
    documented = set(re.findall(r"^\| `(\w+)=", table, re.M))
    assert documented == set(NAMES)
