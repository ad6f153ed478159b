"""Counts of images and patches, and the stand-ins for the images of a sample without any."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

__all__ = [
    "ImageCounts",
    "checked_counts",
    "cu_img_from_counts",
    "empty_like_vision",
    "image_counts_from_cu_img",
    "patches_per_image",
]

ImageCounts: TypeAlias = Sequence[int] | torch.Tensor


def cu_img_from_counts(image_counts: ImageCounts) -> list[int]:
    """Return the cumulative offsets ``[0, c0, c0 + c1, ...]`` of per-sample image counts.

    Args:
        image_counts: Images per sample, integers >= 0; a tensor ``[B]`` or a sequence.

    Returns:
        ``B + 1`` offsets into the images of the micro-batch.

    Raises:
        ValueError: If a count is negative or not an integer, or a tensor is not ``[B]``.
    """
    return list(accumulate(checked_counts("image_counts", image_counts), initial=0))


def image_counts_from_cu_img(cu_img: ImageCounts) -> list[int]:
    """Return images per sample from cumulative offsets (inverse of :func:`cu_img_from_counts`).

    Raises:
        ValueError: If the offsets do not start at 0 or decrease.
    """
    offsets = checked_counts("cu_img", cu_img)
    counts = [end - start for start, end in pairwise(offsets)]
    if not offsets or offsets[0] != 0 or any(count < 0 for count in counts):
        raise ValueError(
            f"cu_img={offsets}: must be the offsets [0, c0, c0 + c1, ...], which start at 0 and "
            "never decrease; make them from per-sample counts with cu_img_from_counts."
        )
    return counts


def checked_counts(name: str, counts: ImageCounts) -> list[int]:
    """Return ``counts`` as a list of integers >= 0, or raise ValueError naming ``name``."""
    if isinstance(counts, torch.Tensor):
        if counts.ndim != 1 or counts.dtype.is_floating_point or counts.dtype.is_complex:
            raise ValueError(
                f"{name} is a {counts.dtype} tensor of shape {list(counts.shape)}: counts must be "
                "integers in one dim."
            )
        counts = counts.tolist()
    for index, count in enumerate(counts):
        if type(count) is not int or count < 0:  # bool is an int, and no count
            raise ValueError(
                f"{name}[{index}]={count!r}: must be an integer >= 0; give plain integers or an "
                "integer tensor."
            )
    return list(counts)


def patches_per_image(grid_thw: torch.Tensor) -> torch.Tensor:
    """Return the patch count ``t * h * w`` of each image.

    Args:
        grid_thw: ``[n_images, 3]``, integers: the patches of each image in time, height, width.

    Returns:
        ``[n_images]``, int64, on the same device.

    Raises:
        ValueError: If ``grid_thw`` is not an integer tensor ``[n_images, 3]``.
    """
    if grid_thw.ndim != 2 or grid_thw.shape[1] != 3 or grid_thw.is_floating_point():
        raise ValueError(
            f"grid_thw is a {grid_thw.dtype} tensor of shape {list(grid_thw.shape)}: must hold "
            "integers [n_images, 3], the (t, h, w) patches of each image."
        )
    return grid_thw.prod(dim=1, dtype=torch.int64)


def empty_like_vision(
    ref_hidden_states: torch.Tensor, ref_grid_thw: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the vision fields of a sample without images, like those of a sample with some.

    Text-only samples carry these, so that all samples have the same keys, dtypes and devices.

    Args:
        ref_hidden_states: ``[patches, dim]`` of any sample.
        ref_grid_thw: ``[n_images, 3]`` of any sample.

    Returns:
        ``hidden_states`` ``[0, dim]`` and ``grid_thw`` ``[0, 3]``.

    Raises:
        ValueError: If a reference is a 0-dim tensor.
    """
    for name, ref in (("ref_hidden_states", ref_hidden_states), ("ref_grid_thw", ref_grid_thw)):
        if ref.ndim == 0:
            raise ValueError(f"{name} has no dims: must have a row per patch or image on dim 0.")
    return (
        ref_hidden_states.new_empty((0, *ref_hidden_states.shape[1:])),
        ref_grid_thw.new_empty((0, *ref_grid_thw.shape[1:])),
    )
