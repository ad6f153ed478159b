"""What one sequence costs when it is packed: a linear plus a quadratic term, kept exact."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from evenstep.balance.packing_input import check_share, positive_int

Coefficient: TypeAlias = int | float | Fraction
"""A finite number >= 0; a float stands for exactly the binary fraction that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLoad:
    """The load of a sequence of L tokens: `linear * L + quadratic * L * L`.

    The attention of a sequence never crosses to its neighbours in the bin, so the load of a bin is
    the sum over its sequences, and the quadratic term is what makes one sequence of 16k tokens
    dearer than sixteen of 1k.

    Loads are planned in exact integers (both coefficients times their common denominator), so no
    sum depends on the order of its terms and a plan is the same on every machine.

    Attributes:
        linear: Load per token.
        quadratic: Load per token and token attended to.
    """

    linear: Coefficient = 1
    quadratic: Coefficient = 0

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            check_share(name, value)
        if not (self.linear or self.quadratic):
            raise ValueError("linear and quadratic are both 0; at least one must be positive")

    @classmethod
    def from_hidden_size(cls, hidden_size: int, *, causal: bool = True) -> "SequenceLoad":
        """Return the load of a dense transformer layer, in token-equivalents.

        A layer of hidden size h multiplies 24 h^2 per token (12 h^2 weights, two operations each:
        4 h^2 in attention, 8 h^2 in a feed-forward of width 4 h) and 4 h per token and token
        attended to (scores and weighted sum); a causal mask halves the latter. Divided by 24 h^2:
        L + L^2 / (12 h) with a causal mask, L + L^2 / (6 h) without (Narayanan et al. 2021,
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        appendix). The number of layers and the backward pass scale both terms alike.

        Args:
            hidden_size: Width h of the model, at least 1.
            causal: Whether a token attends only to those before it.
        """
        hidden_size = positive_int("hidden_size", hidden_size)
        return cls(linear=1, quadratic=Fraction(1, (12 if causal else 6) * hidden_size))

    def of(self, length: int) -> float:
        """Return the load of a sequence of `length` tokens."""
        linear, quadratic, scale = self.integers()
        return (linear + quadratic * length) * length / scale

    def integers(self) -> tuple[int, int, int]:
        """Return `(a, b, scale)` with `load = (a * L + b * L * L) / scale`, all integers."""
        linear, quadratic = Fraction(self.linear), Fraction(self.quadratic)
        scale = math.lcm(linear.denominator, quadratic.denominator)
        return int(linear * scale), int(quadratic * scale), scale
