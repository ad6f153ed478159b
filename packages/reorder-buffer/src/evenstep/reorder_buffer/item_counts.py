"""How many items (images, videos, clips) each sample has, where no field of the batch says it."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import torch

from evenstep.reorder_buffer.vision import ImageCounts
from evenstep.serialize import Leaf

__all__ = ["Counts", "ItemCounter", "TokenCounter", "row_products"]

Counts: TypeAlias = ImageCounts | Mapping[str, ImageCounts]
"""Items per sample: for every group of items alike, or by the name of the group."""


class ItemCounter(Protocol):
    """Finds the items of each sample from the fields of a micro-batch."""

    def __call__(self, fields: Mapping[str, Leaf]) -> Sequence[int]:
        """Return the number of items of each sample, in batch order; ``fields`` has dotted keys."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """Counts items by their placeholder tokens: an item of ``n`` patches has ``n / merge`` tokens.

    Hugging Face processors return the grids of a micro-batch end to end and leave out how many
    belong to each sample, but a sample's placeholders tell it: they must be exactly those of its
    items.

    Attributes:
        token_id: The placeholder's id in ``input_ids``.
        grid: Key of the grid, ``[items, 3]``.
        square_merge_size: Patches per placeholder token (``spatial_merge_size ** 2``).
        input_ids: Key of the ids, ``[B, S]``.
    """

    token_id: int
    grid: str
    square_merge_size: int = 1
    input_ids: str = "input_ids"

    def __call__(self, fields: Mapping[str, Leaf]) -> Sequence[int]:
        """Return items per sample.

        Raises:
            ValueError: If the ids are missing, or a sample's tokens are not those of whole items.
        """
        ids = fields.get(self.input_ids)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise ValueError(
                f"field {self.input_ids!r}: must be a tensor [B, S] to count the items of "
                f"{self.grid!r} by token {self.token_id}; pass the counts per sample instead."
            )
        sizes = row_products(self.grid, fields[self.grid])
        tokens = [size // self.square_merge_size for size in sizes]
        ends = list(accumulate(tokens, initial=0))
        found = (ids == self.token_id).sum(dim=1).tolist()
        cuts = [0]
        for sample, total in enumerate(accumulate(found)):
            cut = bisect_left(ends, total)
            if cut == len(ends) or ends[cut] != total or 0 in tokens:
                raise ValueError(
                    f"field {self.input_ids!r}: sample {sample} has {found[sample]} tokens "
                    f"{self.token_id}, which are not those of whole items of {self.grid!r} "
                    f"({tokens} tokens each); check token_id and square_merge_size "
                    f"({self.square_merge_size}), and that no sample was cut short."
                )
            cuts.append(cut)
        return [end - start for start, end in pairwise(cuts)]


def row_products(key: str, value: Leaf) -> list[int]:
    """Return the entries of a count field: integers as they are, of a grid each row's product.

    Args:
        key: The field's key, for error messages.
        value: An integer tensor ``[n]`` or ``[n, k]``, or a list or tuple of ``n`` integers.

    Returns:
        ``n`` counts.

    Raises:
        ValueError: If the value cannot count.
    """
    if isinstance(value, torch.Tensor):
        if value.ndim in (1, 2) and not (value.is_floating_point() or value.is_complex()):
            entries = value.tolist()
            if value.ndim == 2:  # short rows, and few of them beside what they count
                entries = [math.prod(row) for row in entries]
        else:
            entries = [None]
    else:
        entries = list(value) if isinstance(value, list | tuple) else [None]
    for index, entry in enumerate(entries):
        if type(entry) is not int or entry < 0:
            shown = "" if entry is None else f" (entry {index} is {entry!r})"
            raise ValueError(
                f"field {key!r}: other fields are ragged along it, so it must hold counts >= 0: an "
                f"integer tensor [n] or [n, k], or a list of n integers{shown}."
            )
    return entries
