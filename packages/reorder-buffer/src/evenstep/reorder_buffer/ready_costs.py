"""Ready cost functions: text by its tokens, images by their size, or both.

All of a run's costs need one unit. By default that is a token of text and a patch (or element) of
an image; the models of `evenstep.balance` (`transformer_cost(...).of`, `encoder_cost(...).of`)
count floating-point operations of both instead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from evenstep.serialize import FlatSample

__all__ = ["ImageCost", "TextAndImageCost", "TextCost"]

_Model: TypeAlias = Callable[[int], float]
"""From a length to a cost, as `evenstep.balance.CostModel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCost:
    """The cost of a sample's text, from its number of tokens.

    Attributes:
        field: Key of the field that tells the tokens: by default the attention mask. Without one,
            `TextCost(field="input_ids", ignore=pad_token_id)`; without padding,
            `TextCost(field="input_ids", ignore=None)`.
        ignore: The entry of `field` that is no token; None counts all entries.
        model: The cost by the number of tokens; None is that number. `transformer_cost(...).of`
            of `evenstep.balance` adds what attention costs.
    """

    field: str = "attention_mask"
    ignore: int | None = 0
    model: _Model | None = None

    def __call__(self, flat: FlatSample, /) -> float:
        """Return the cost of one sample.

        Raises:
            ValueError: If it has no such field.
        """
        value = flat.get(self.field)
        if isinstance(value, list | tuple):
            value = torch.tensor(value)
        if not isinstance(value, torch.Tensor):
            found = repr(value) if self.field in flat else "missing"
            raise ValueError(
                f"field {self.field!r} is {found}; "
                "TextCost counts a sample's tokens in it, so name a field that tells them, for "
                "example TextCost(field='input_ids', ignore=pad_token_id)"
            )
        tokens = value.numel() if self.ignore is None else int((value != self.ignore).sum())
        return float(tokens if self.model is None else self.model(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """The cost of a sample's images, from the number of elements that hold them.

    A sample without the field, or with None there, has no images and costs 0.

    Attributes:
        field: Key of the field that holds the images: `[images, C, H, W]`, `[patches, dim]`, ...
        elements_per_patch: Elements of `field` that make a patch, for example `3 * 14 * 14`.
        model: The cost by the number of patches, rounded up; None is the number itself. All images
            of a sample count as one: for attention within each, write a function of your own.
    """

    field: str = "pixel_values"
    elements_per_patch: int = 1
    model: _Model | None = None

    def __post_init__(self) -> None:
        if self.elements_per_patch < 1:
            raise ValueError(f"elements_per_patch is {self.elements_per_patch}; it must be >= 1")

    def __call__(self, flat: FlatSample, /) -> float:
        """Return the cost of one sample.

        Raises:
            ValueError: If the field is no tensor.
        """
        value = flat.get(self.field)
        if value is None:
            return 0.0
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"field {self.field!r} is a {type(value).__name__}; ImageCost counts the elements "
                "of a tensor"
            )
        if self.model is None:
            return value.numel() / self.elements_per_patch
        return float(self.model(-(-value.numel() // self.elements_per_patch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAndImageCost:
    """The cost of text plus `image_weight` times the cost of images.

    Attributes:
        text: The cost of the text, in any unit.
        image: The cost of the images.
        image_weight: Tokens of text that take as long as one patch (or element): measure it.
    """

    image_weight: float
    text: TextCost = field(default_factory=TextCost)
    image: ImageCost = field(default_factory=ImageCost)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.image_weight) and self.image_weight >= 0):
            raise ValueError(f"image_weight is {self.image_weight}; it must be finite and >= 0")

    def __call__(self, flat: FlatSample, /) -> float:
        """Return the cost of one sample."""
        return self.text(flat) + self.image_weight * self.image(flat)
