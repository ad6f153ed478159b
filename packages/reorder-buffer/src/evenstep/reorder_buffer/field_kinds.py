"""What a field of a micro-batch can be, and how its rule is found by its dotted key.

A field's kind is declared, never guessed from its shape: shapes only confirm what the rule says,
because a shape can agree by chance (``[3, B, S]`` position ids of three samples, a pair of numbers
in a micro-batch of two).
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Batched", "FieldKind", "Global", "Items", "Ragged", "key_pattern", "parent_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """One entry per sample: a tensor with a batch dim, or a list or tuple of ``B`` values.

    Attributes:
        dim: The batch dim of a tensor; negative counts from the end.
        ndim: Number of dims a tensor must have for this rule to apply to it; other tensors fall
            through to the rules after it. None applies to all.
        pad: What to fill shorter samples with along their last dim when the samples of one
            micro-batch come from micro-batches of different lengths. None refuses such samples.
        pad_side: The end at which the filling stands.
    """

    dim: int = 0
    ndim: int | None = None
    pad: float | None = None
    pad_side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        if self.ndim is not None and not -self.ndim <= self.dim < self.ndim:
            raise ValueError(
                f"Batched(dim={self.dim}, ndim={self.ndim}): dim must be a dim of a tensor with "
                f"{self.ndim} dims; give one in [{-self.ndim}, {self.ndim})."
            )
        if self.pad_side not in ("left", "right"):
            raise ValueError(
                f"Batched(pad_side={self.pad_side!r}): must be 'left' or 'right', the end that the "
                "loader pads."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """One row per item (image, video, clip), the items of a sample together, in sample order.

    How many items each sample has is not a field of the micro-batch. It is, in this order: what
    the caller gives for the group by name, what the layout's counter for the group finds, what the
    caller gives without a name, or one item per sample where the rule says so.

    Attributes:
        of: The group of items that the rows belong to; fields of one group share their counts.
            Empty names the sub-dict that holds the field (``modality_inputs.images.clip``), so
            each encoder has counts of its own.
        one_each: Whether samples have one item each where nothing else tells. Without it such a
            micro-batch is refused, since as many items as samples may lie in any of them.
    """

    of: str = ""
    one_each: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """As many rows per entry as a count field of the same micro-batch says, end to end on dim 0.

    A count field ``[n]`` gives its entries as they are, a grid ``[n, 3]`` the product of each row.
    The count field may itself be batched (an entry per sample), or have several entries per
    sample (:class:`Items`, or ragged along a further count field). Where the micro-batch has no
    such count field (None on language shards, or absent) and the rule of that field is
    :class:`Items`, every item has one row.

    Attributes:
        along: Key of the count field; a leading dot names a sibling in the same sub-dict.
    """

    along: str

    def __post_init__(self) -> None:
        if not self.along.strip("."):
            raise ValueError(
                f"Ragged(along={self.along!r}): must name the count field, as 'num_images' or, for "
                "a sibling in the same sub-dict, '.grid_thw'."
            )

    def count_key(self, key: str) -> str:
        """Return the key of the count field of the field ``key``."""
        if not self.along.startswith("."):
            return self.along
        parent = parent_key(key)
        return f"{parent}{self.along}" if parent else self.along[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """The same for all samples: goes with each of them, and is merged only if equal."""


FieldKind: TypeAlias = Batched | Items | Ragged | Global

_SEGMENT = r"(?:[^.\\]|\\.)+"  # one name of a dotted key, in which a backslash escapes a dot


def key_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern over dotted keys: ``*`` is any one name, ``**`` any number of names.

    Args:
        pattern: Such as ``modality_inputs.*.*.grid_thw`` or ``**.position_ids``.

    Returns:
        An expression that fully matches ``key + "."``.

    Raises:
        ValueError: If the pattern is empty or mixes a star with other characters in one name.
    """
    names = re.findall(_SEGMENT, pattern)
    if not pattern or ".".join(names) != pattern:
        raise ValueError(
            f"field pattern {pattern!r}: must be names joined by single dots; write one such as "
            "'modality_inputs.*.*.grid_thw'."
        )
    parts = []
    for name in names:
        if name == "**":
            parts.append(rf"(?:{_SEGMENT}\.)*")
        elif name == "*":
            parts.append(rf"{_SEGMENT}\.")
        elif "*" in name:
            raise ValueError(
                f"field pattern {pattern!r}: {name!r} mixes a star with other characters; a star "
                "stands for one whole name, two stars for any number of names."
            )
        else:
            parts.append(re.escape(f"{name}."))
    return re.compile("".join(parts))


def parent_key(key: str) -> str:
    r"""Return ``key`` without its last name, "" at the top; ``\.`` does not separate names."""
    return ".".join(re.findall(_SEGMENT, key)[:-1])
