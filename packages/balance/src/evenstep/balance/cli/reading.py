"""From records to checked numbers: what is allowed, and which lines are bad."""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from evenstep.balance.cli.errors import InputError
from evenstep.balance.cli.records import Missing, Record

# Above this, a float no longer holds every integer.
MAX_LENGTH = 2**53

_NUMBER_TYPES = frozenset({str, int, float})
_CHUNK = 4096
_EXAMPLES = 5
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a number must be.

    Attributes:
        least: Smallest number.
        most: Largest number, itself allowed if it is finite.
        integer: Whether it must be an integer.
        noun: What more than `most` is called, for the message.
        option: What allows numbers above `most`, None if nothing does.
    """

    least: int = 0
    most: float = math.inf
    integer: bool = False
    noun: str = "a finite number"
    option: str | None = None

    def accepts(self, numbers: list[float]) -> bool:
        """Return whether all of the numbers, at least one, follow the rule."""
        sound = float.is_integer if self.integer else math.isfinite
        # Soundness first: NaN would make the comparisons depend on the order.
        return all(map(sound, numbers)) and min(numbers) >= self.least and max(numbers) <= self.most

    def reason_against(self, value: object) -> str | None:
        """Return why the value is no number that follows the rule; None if it is one."""
        if isinstance(value, Missing):
            return value.reason
        number = _to_number(value)
        if number is None:
            return f"{_show(value)} is not a number"
        if self.accepts([number]):
            return None
        if self.is_exceeded_by(value):
            return f"{_show(value)} is more than {self.noun} of {self.most:,}"
        return (
            f"{_show(value)} is not {'an integer' if self.integer else self.noun} >= {self.least}"
        )

    def is_exceeded_by(self, value: object) -> bool:
        """Return whether the value is a number, and only too large."""
        number = _to_number(value)
        return number is not None and self.most < number < math.inf


COST = Rule()
"""A finite number >= 0."""

LENGTH = Rule(integer=True, most=MAX_LENGTH, noun="the most that can be told apart,")
"""An integer >= 0."""


def packable(capacity: int) -> Rule:
    """Return the rule for lengths that must fit into a bin."""
    return Rule(
        integer=True, least=1, most=capacity, noun="the capacity", option="raise --capacity"
    )


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
    num_bad = 0
    option = None
    examples: list[str] = []
    for chunk in _chunks(records):
        good = _all_numbers(chunk, rule)
        if good is None:  # look at each of them, to say which are bad
            good = []
            for line, value in chunk:
                reason = rule.reason_against(value)
                if reason is None:
                    good.append(float(value))  # type: ignore[arg-type]  # the rule says it is one
                    continue
                num_bad += 1
                if rule.is_exceeded_by(value):
                    option = rule.option
                if num_bad <= _EXAMPLES:
                    examples.append(f"line {line}: {reason}")
        values.extend(good)
    numbers = Numbers(values=values, num_bad=num_bad, bad=tuple(examples))
    if num_bad and not skip_bad:
        raise InputError(f"{numbers.describe_bad()}\n{_remedy(numbers, option)}")
    if not values:
        raise InputError("there is no number in it" + (f"; {examples[0]}" if examples else ""))
    return numbers


def _remedy(numbers: Numbers, option: str | None) -> str:
    """Return what can be done about the bad lines; `option` is one more thing that can."""
    if not numbers.values:
        remedies = "every line is bad: check --format, --key or --column"
        return f"{remedies}, or {option}" if option else remedies
    if option:
        return f"mend them, leave them out with --skip-bad, or {option}"
    return "mend them, or leave them out with --skip-bad"


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    iterator = iter(records)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _all_numbers(chunk: list[Record], rule: Rule) -> list[float] | None:
    """Return the chunk's numbers if all of them are good: the fast way for millions of lines."""
    values = [value for _, value in chunk]
    if not _NUMBER_TYPES.issuperset(map(type, values)):
        return None
    try:
        numbers = list(map(float, values))  # type: ignore[arg-type]  # their types were just checked
    except (ValueError, OverflowError):
        return None
    return numbers if rule.accepts(numbers) else None


def _to_number(value: object) -> float | None:
    if type(value) not in _NUMBER_TYPES:  # bool is an int to isinstance
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # its type was just checked
    except (ValueError, OverflowError):
        return None


def _show(value: object) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return ascii(shown) if isinstance(value, str) else shown
