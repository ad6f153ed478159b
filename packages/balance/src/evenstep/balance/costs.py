"""Cost models: from what a sample holds (tokens, patches) to its estimated work.

A cost model is any function from a length to a finite float >= 0. Only the ratios of costs matter
to a plan, so costs that are added must share one unit: `transformer_cost` and `encoder_cost` both
count floating-point operations, and a sample of a vision-language model costs

    language(num_tokens) + math.fsum(map(encoder, patches_per_image))

Where seconds have been measured, `evenstep.balance.calibrate` finds the coefficients instead. Add
costs with `math.fsum`: the built-in `sum` rounds floats differently from Python 3.12 on, and all
ranks must compute the same cost.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from evenstep.balance.checks import check_ordered, checked_count
from evenstep.balance.packing_load import SequenceLoad, layer_operations

CostModel: TypeAlias = Callable[[int], float]
"""From a length (tokens, patches) to a cost, a finite float >= 0."""

# A backward pass computes two products (for the input and for the weight) per product forward.
FORWARD_AND_BACKWARD = 3

LARGEST_FLOAT = sys.float_info.max
"""What is larger, an integer or a fraction, is not finite as a float."""


def transformer_cost(
    *,
    hidden_size: int,
    num_layers: int = 1,
    params_per_layer: int | None = None,
    attention_dim: int | None = None,
    vocab_size: int = 0,
    causal: bool = True,
    passes: float = FORWARD_AND_BACKWARD,
) -> SequenceLoad:
    """Return the floating-point operations that a transformer spends on a sequence of L tokens.

    Per layer, forward: 2 P L in its P weights, and 4 d L**2 in attention of width d
    (`layer_operations` derives both), of which a causal kernel skips the half above the diagonal.
    With the defaults this is 24 h**2 * (L + L**2 / (12 h)), times `passes`: attention costs as much
    as the weights at L = 12 h, or at 6 h where it is not causal. The vocabulary's logits add
    2 h V L once.

    Source: Narayanan et al. 2021, appendix (see `layer_operations`): 24 B s h**2 + 4 B s**2 h per
    layer forward, attention not causal, and 6 B s h V for the logits forward and backward. Like
    there, norms, activation functions and memory traffic are left out.

    Args:
        hidden_size: h.
        num_layers: Layers. Matters only beside `vocab_size`, or when costs of two models are added.
        params_per_layer: P, the weights that one token meets in a layer; None means 12 h**2. Give
            it for gated feed-forwards, grouped queries and mixtures of experts (the active ones).
        attention_dim: d, heads x head size; None means h.
        vocab_size: V; 0 leaves the logits out.
        causal: Whether a token attends only to those before it.
        passes: Work of a whole step in forward passes: 3 with backward, 4 with full activation
            recomputation, 1 for a frozen model.

    Raises:
        ValueError: A size is not an integer in its range, or `passes` is not positive and finite.
    """
    per_token, per_pair = layer_operations(hidden_size, params_per_layer, attention_dim)
    num_layers = checked_count(num_layers, "num_layers")
    logits = 2 * hidden_size * checked_count(vocab_size, "vocab_size") if vocab_size else 0
    return SequenceLoad(
        linear=_checked_passes(passes) * (per_token * num_layers + logits),
        quadratic=passes * (per_pair // 2 if causal else per_pair) * num_layers,
    )


def encoder_cost(
    *,
    hidden_size: int,
    num_layers: int = 1,
    params_per_layer: int | None = None,
    windowed_layers: int = 0,
    window_patches: int | None = None,
    passes: float = FORWARD_AND_BACKWARD,
) -> SequenceLoad:
    """Return the floating-point operations that a vision encoder spends on an image of L patches.

    The layers are those of `transformer_cost` without the causal mask: 2 P L + 4 h L**2 per layer.
    Images do not attend to each other, so a sample costs the sum over its images. In a layer with
    windowed attention a patch meets only the w patches of its window, which takes 4 h w L; an image
    smaller than one window is counted a little too high.

    Args:
        hidden_size: h of the encoder.
        num_layers: All layers of the encoder.
        params_per_layer: P; None means 12 h**2.
        windowed_layers: How many of the layers use windowed attention.
        window_patches: w, the patches of a window; needed where layers are windowed.
        passes: As in `transformer_cost`; 1 for a frozen encoder.

    Raises:
        ValueError: A size is not an integer in its range, or `passes` is not positive and finite.
    """
    per_token, per_pair = layer_operations(hidden_size, params_per_layer)
    num_layers = checked_count(num_layers, "num_layers")
    if not 0 <= windowed_layers <= num_layers:
        raise ValueError(
            f"windowed_layers is {windowed_layers!r}; it must be in 0 .. num_layers={num_layers}, "
            "which counts all layers"
        )
    if windowed_layers and window_patches is None:
        raise ValueError(
            f"window_patches is None; windowed_layers={windowed_layers} needs the patches of a "
            "window"
        )
    window = 0 if window_patches is None else checked_count(window_patches, "window_patches")
    return SequenceLoad(
        linear=_checked_passes(passes)
        * (per_token * num_layers + per_pair * window * windowed_layers),
        quadratic=passes * per_pair * (num_layers - windowed_layers),
    )


class TableCost:
    """A cost model from measured points, with straight lines between them.

    Nothing is guessed outside the table: a length below the first or above the last point raises.

    Args:
        points: Cost (finite, >= 0) by length (an integer >= 0), in any order.

    Raises:
        ValueError: There is no point, or a length or a cost is out of range.
    """

    __slots__ = ("_costs", "_lengths")

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise ValueError("points is empty; give at least one length and its cost")
        for length, cost in points.items():
            if length != 0:
                checked_count(length, "a length in points")
            if not 0 <= cost <= LARGEST_FLOAT:
                raise ValueError(f"points[{length}] is {cost!r}; it must be finite and >= 0")
        self._lengths = sorted(points)
        self._costs = [float(points[length]) for length in self._lengths]

    def __call__(self, length: int, /) -> float:
        """Return the cost on the line between the two neighbouring points.

        Raises:
            ValueError: `length` lies outside the table, or is NaN.
        """
        first, last = self._lengths[0], self._lengths[-1]
        if not first <= length <= last:
            raise ValueError(
                f"length is {length!r}; it must lie within the table, {first} .. {last}: "
                "measure a point that covers it"
            )
        above = bisect_left(self._lengths, length)
        if self._lengths[above] == length:
            return self._costs[above]
        below = above - 1
        share = (length - self._lengths[below]) / (self._lengths[above] - self._lengths[below])
        return self._costs[below] + share * (self._costs[above] - self._costs[below])

    def __repr__(self) -> str:
        return f"TableCost({dict(zip(self._lengths, self._costs, strict=True))!r})"


def evaluate_costs(model: CostModel, lengths: Iterable[int]) -> list[float]:
    """Return the cost of each length, in order, checked.

    Args:
        model: Any cost model: `transformer_cost(...)`, a `TableCost`, a function of yours.
        lengths: Tokens or patches of each sample.

    Raises:
        ValueError: The model refused a length, or returned something that is no cost or too large
            for a float; the message gives the sample's index. Or `lengths` has no order. Errors of
            other types pass through unchanged.
    """
    check_ordered(lengths, "lengths")
    costs: list[float] = []
    for index, length in enumerate(lengths):
        try:
            cost = float(model(length))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"sample {index}: {error}") from error
        if not 0 <= cost < math.inf:
            raise ValueError(
                f"sample {index}: the model says that length {length!r} costs {cost!r}; "
                "a cost must be finite and >= 0"
            )
        costs.append(cost)
    return costs


def _checked_passes(passes: float) -> float:
    if not 0 < passes < math.inf:
        raise ValueError(
            f"passes is {passes!r}; it must be positive and finite: 3 with backward, 1 for a "
            "frozen model"
        )
    return passes
