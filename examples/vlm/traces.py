"""The sizes of real images and conversations: quantile tables, a CSV reader, the patch rule."""

import math
from pathlib import Path
from typing import NamedTuple

from vlm.layout import MERGE_SIDE, PATCH_SIDE

MERGED_PIXELS = PATCH_SIDE * MERGE_SIDE  # sides of images are multiples of this
MAX_MERGED_TOKENS = 16_384  # of one image, before `scale`

# Quantiles at 0, 5, ..., 100 %.
# Images: the 626 scanned receipts of ICDAR 2019 SROIE, through the patch rule of `image_grid`.
RECEIPT_PATCHES = (
    *(1496, 3399, 3784, 3960, 4400, 4701, 5016, 5376, 5800, 6496),
    *(7298, 7868, 8448, 8580, 9088, 9786, 10428, 13188, 65056, 65056, 65232),
)
RECEIPT_HEIGHT_PER_WIDTH = (
    *(1.03, 1.41, 1.41, 1.41, 1.54, 1.72, 1.82, 1.89, 1.92, 1.96),
    *(1.99, 2.05, 2.10, 2.22, 2.29, 2.36, 2.43, 2.52, 2.68, 2.97, 3.80),
)
# Text: context and generated tokens per request of the Azure LLM inference trace 2023,
# conversation (AzurePublicDataset, CC BY 4.0).
CONVERSATION_TOKENS = (
    *(64, 296, 368, 434, 473, 491, 506, 528, 800, 1319),
    *(1412, 1444, 1469, 1494, 1522, 1558, 1628, 2000, 2820, 4136, 14089),
)


class ImageSize(NamedTuple):
    """An image in pixels."""

    width: int
    height: int


class TraceError(ValueError):
    """A trace file is missing or has a row that is no image size."""


def quantile(table: tuple[float, ...], share: float) -> float:
    """Read a quantile table of evenly spaced shares at `share` in [0, 1], linearly between."""
    place = share * (len(table) - 1)
    below = min(int(place), len(table) - 2)
    return table[below] + (table[below + 1] - table[below]) * (place - below)


def receipt_size(patches_share: float, shape_share: float) -> ImageSize:
    """Return the image at these shares of the two receipt tables."""
    area = quantile(RECEIPT_PATCHES, patches_share) * PATCH_SIDE**2
    width = math.sqrt(area / quantile(RECEIPT_HEIGHT_PER_WIDTH, shape_share))
    return ImageSize(round(width), round(area / width))


def image_grid(size: ImageSize, *, scale: int) -> tuple[int, int]:
    """Return the rows and columns of patches of an image, as Qwen2-VL resizes images.

    Both sides are divided by the square root of `scale`, which divides the patches by `scale`, and
    rounded to multiples of MERGED_PIXELS. An image above MAX_MERGED_TOKENS / `scale` tokens is
    shrunk to fit, its sides rounded down.
    """
    width, height = (side / math.sqrt(scale) / MERGED_PIXELS for side in size)
    limit = MAX_MERGED_TOKENS / scale
    rows, columns = (max(1, round(side)) for side in (height, width))
    if rows * columns > limit:
        shrink = math.sqrt(limit / (width * height))
        rows, columns = (max(1, math.floor(side * shrink)) for side in (height, width))
    return rows * MERGE_SIDE, columns * MERGE_SIDE


def read_image_sizes(path: Path) -> tuple[ImageSize, ...]:
    """Read the image sizes of a CSV file of width,height rows; a header is not needed.

    Raises:
        TraceError: If the file cannot be read, has no rows, or has a row that is not two positive
            whole numbers; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(f"cannot read the trace {path}: {reason}") from error
    rows = list(enumerate(lines, 1))
    if lines and lines[0].replace(" ", "").lower() == "width,height":
        del rows[0]
    sizes = tuple(_image_size(path, number, line) for number, line in rows)
    if not sizes:
        raise TraceError(f"{path} has no images: add rows of width,height in pixels")
    return sizes


def _image_size(path: Path, line_number: int, line: str) -> ImageSize:
    try:
        width, height = map(int, line.split(","))
    except ValueError:
        width = height = 0
    if min(width, height) < 1:
        raise TraceError(
            f"{path}, line {line_number}: {line!r} is not a row of two positive whole numbers, "
            "width,height in pixels"
        )
    return ImageSize(width, height)
