"""What one sequence costs when it is packed: a linear plus a quadratic term, kept exact."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from evenstep.balance.checks import checked_count
from evenstep.balance.packing_input import check_share

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
    _integers: tuple[int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            check_share(name, value)
        if not (self.linear or self.quadratic):
            raise ValueError("linear and quadratic are both 0; at least one must be positive")
        linear, quadratic = Fraction(self.linear), Fraction(self.quadratic)
        scale = math.lcm(linear.denominator, quadratic.denominator)
        exact = int(linear * scale), int(quadratic * scale), scale
        object.__setattr__(self, "_integers", exact)  # frozen, and set once

    @classmethod
    def from_hidden_size(cls, hidden_size: int, *, causal: bool = True) -> "SequenceLoad":
        """Return the load of a dense transformer layer, in token-equivalents.

        Divided by its work per token (`layer_operations`), a layer of hidden size h costs
        L + L^2 / (12 h) with a causal mask, which halves the attention, and L + L^2 / (6 h)
        without. The number of layers and the backward pass scale both terms alike.

        Args:
            hidden_size: Width h of the model, at least 1.
            causal: Whether a token attends only to those before it.
        """
        per_token, per_pair = layer_operations(hidden_size)
        return cls(linear=1, quadratic=Fraction(per_pair // 2 if causal else per_pair, per_token))

    def __call__(self, length: int, /) -> float:
        """Return the load of a sequence of `length` tokens: a load is a cost model."""
        linear, quadratic, scale = self._integers
        return (linear + quadratic * length) * length / scale

    def of(self, length: int) -> float:
        """Return the load of a sequence of `length` tokens, as calling the load does."""
        return self(length)

    def integers(self) -> tuple[int, int, int]:
        """Return `(a, b, scale)` with `load = (a * L + b * L * L) / scale`, all integers."""
        return self._integers


def layer_operations(
    hidden_size: int, params_per_layer: int | None = None, attention_dim: int | None = None
) -> tuple[int, int]:
    """Return one layer's forward operations per token, and per token and token attended to.

    A product of an [m, k] with a [k, n] matrix takes 2 m k n operations, so a layer takes 2 P per
    token in its P weights, and 4 d per pair: 2 d for the score, 2 d for its product with the value.
    The classic layer of hidden size h has 4 h^2 weights in attention and 8 h^2 in a feed-forward of
    width 4 h.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM" (arXiv:2104.04473), appendix.

    Args:
        hidden_size: h, at least 1.
        params_per_layer: P; None means 12 h^2.
        attention_dim: d, heads x head size; None means h.
    """
    width = checked_count(hidden_size, "hidden_size")
    weights = 12 * width**2
    if params_per_layer is not None:
        weights = checked_count(params_per_layer, "params_per_layer")
    if attention_dim is not None:
        width = checked_count(attention_dim, "attention_dim")
    return 2 * weights, 4 * width
