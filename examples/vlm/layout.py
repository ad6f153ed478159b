"""What a micro-batch of this run looks like, and the order of an image's patches.

The nested layout is the one that the reordering buffer splits into samples and merges again.
"""

from typing import TypedDict, cast

import torch
from torch import Tensor

PATCH_SIDE = 14  # pixels
PATCH_DIM = 3 * PATCH_SIDE**2  # red, green and blue of every pixel
MERGE_SIDE = 2  # the model reads MERGE_SIDE x MERGE_SIDE patches as one image token

PADDING, IMAGE_START, IMAGE_TOKEN, FIRST_WORD = range(4)  # token ids
NUM_WORDS = 509
VOCABULARY_SIZE = FIRST_WORD + NUM_WORDS


class Images(TypedDict):
    """All images of a micro-batch end to end: sample by sample, image by image."""

    hidden_states: Tensor
    """The patches, float32 [patches, PATCH_DIM]."""
    grid_thw: Tensor
    """Frames (1 here), rows and columns of patches of each image, int64 [images, 3]."""


class Batch(TypedDict):
    """One micro-batch of B samples, each padded at its end to S tokens."""

    sample_index: Tensor
    """Place of each sample in the stream that all ranks read, int64 [B]."""
    input_ids: Tensor
    """int64 [B, S]; per image one IMAGE_START and then one IMAGE_TOKEN per merged patch."""
    labels: Tensor
    """The token that follows, int64 [B, S]."""
    loss_mask: Tensor
    """1 where the label counts, float32 [B, S]."""
    attention_mask: Tensor
    """True at real tokens, False at padding, bool [B, S]."""
    position_ids: Tensor
    """Time, row and column of each token, int64 [3, B, S]."""
    modality_inputs: dict[str, dict[str, Images]]
    """`["images"]["clip"]` holds the images."""


def images_of(batch: Batch) -> Images:
    """Return the images of a micro-batch."""
    return batch["modality_inputs"]["images"]["clip"]


def images_per_sample(batch: Batch) -> Tensor:
    """Count the images of each sample, int64 [B]: each begins with one IMAGE_START."""
    return (batch["input_ids"] == IMAGE_START).sum(dim=1)


def patches_per_sample(batch: Batch) -> Tensor:
    """Count the patches of each sample, int64 [B]: each image token stands for a merged square."""
    return (batch["input_ids"] == IMAGE_TOKEN).sum(dim=1) * MERGE_SIDE**2


def patch_coordinates(rows: int, columns: int) -> Tensor:
    """Return row and column of an image's patches in the order in which they are stored.

    The patches that become one image token stand together: merged square by merged square, and
    row by row within it.

    Returns:
        int64 [2, rows * columns].
    """
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    squares = grid.view(2, rows // MERGE_SIDE, MERGE_SIDE, columns // MERGE_SIDE, MERGE_SIDE)
    return squares.transpose(2, 3).reshape(2, -1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a micro-batch; tensors that are there already are not copied."""
    return cast("Batch", _to_device(batch, device))


def _to_device(value: object, device: torch.device) -> object:
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
