"""The README's example runs."""

import doctest
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "gbpacking" / "README.md"


def test_the_readmes_example() -> None:
    text = README.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
