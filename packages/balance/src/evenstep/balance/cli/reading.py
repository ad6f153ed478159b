"""From records to checked numbers: what is allowed, and which lines are bad."""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from evenstep.balance.cli.errors import InputError
from evenstep.balance.cli.records import Missing, Record

Rule: TypeAlias = Callable[[object], float]
"""Returns the number that a value stands for; raises ValueError with the reason if there is none.

The reason continues a sentence that starts with the line: "is -3; ...".
"""

# Above this, a float no longer holds every integer.
MAX_LENGTH = 2**53

_EXAMPLES = 5
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers of a source, eight bytes each, and the lines that held none.

    Attributes:
        values: In the order of the source.
        num_bad: How many lines were bad.
        bad: The first few of them, each a sentence with the line's number.
    """

    values: "array[float]"
    num_bad: int
    bad: tuple[str, ...]

    def describe_bad(self) -> str:
        """Return how many lines were bad, and the first few of them, one per line of text."""
        lines = "1 bad line" if self.num_bad == 1 else f"{self.num_bad:,} bad lines"
        more = [f"... and {self.num_bad - len(self.bad):,} more"]
        examples = [*self.bad, *(more if self.num_bad > len(self.bad) else [])]
        return "\n  ".join([f"{lines} of {self.num_bad + len(self.values):,}:", *examples])


def read_numbers(records: Iterable[Record], rule: Rule, *, skip_bad: bool = False) -> Numbers:
    """Read all records, so that all bad lines are counted.

    Args:
        records: From `Source.records`.
        rule: What a number must be.
        skip_bad: Leave bad lines out instead of raising.

    Raises:
        InputError: A line is bad (unless `skip_bad`), or there is no number.
    """
    values = array("d")
    append = values.append
    num_bad = 0
    examples: list[str] = []
    for line, value in records:
        try:
            append(rule(value))
        except ValueError as reason:
            num_bad += 1
            if num_bad <= _EXAMPLES:
                examples.append(f"line {line}: {reason}")
    numbers = Numbers(values=values, num_bad=num_bad, bad=tuple(examples))
    if num_bad and not skip_bad:
        raise InputError(numbers.describe_bad() + "\nmend them, or leave them out with --skip-bad")
    if not values:
        raise InputError("there is no number in it" + (f"; {examples[0]}" if examples else ""))
    return numbers


def cost(value: object) -> float:
    """Accept a finite number >= 0."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{_show(value)} is not a finite number >= 0")
    return number


def length_of(least: int, most: int = MAX_LENGTH) -> Rule:
    """Return a rule that accepts integers in `least` .. `most`."""

    def length(value: object) -> float:
        number = _number(value)
        if least <= number <= most and number == int(number):
            return number
        if most < number < MAX_LENGTH:
            raise ValueError(f"{_show(value)} tokens are more than the capacity of {most}")
        raise ValueError(f"{_show(value)} is not an integer >= {least}")

    return length


def _number(value: object) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    if isinstance(value, Missing):
        raise ValueError(value.reason)
    raise ValueError(f"{_show(value)} is not a number")


def _show(value: object) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return ascii(shown) if isinstance(value, str) else shown
