"""The inputs of the benchmarks: two traces of real work and a heavy-tailed distribution, seeded.

Every draw takes a `random.Random`, so that a seed fixes it on any machine and Python version.
"""

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
"""Where the traces lie beside a checkout: they are not part of the repository."""

TRACES_VARIABLE = "EVENSTEP_TRACES"
"""Environment variable that names another folder of traces."""

PATCH_PIXELS = 14
"""Side of a vision patch."""

MERGED_PIXELS = 2 * PATCH_PIXELS
"""Side of a merged vision token: 2 x 2 patches."""

LONG_MU, LONG_SIGMA, LONG_MIN, LONG_MAX = 8.89, 1.05, 895, 126527
"""The *long* distribution: lognormal lengths of long-document chat, in tokens, clipped."""


def traces_folder() -> Path:
    """Return the folder of traces: `EVENSTEP_TRACES` if set, else `../shared/traces`."""
    return Path(os.environ.get(TRACES_VARIABLE) or DEFAULT_TRACES)


def conversation_tokens() -> list[int]:
    """Return tokens per request of the conversation trace (19,366 requests, in trace order)."""
    return [int(line) for line in _lines("azure_conv_tokens.txt")]


def receipt_patches(*, max_merged_tokens: int = 16384) -> list[int]:
    """Return patches per receipt image (626 images, in trace order).

    Args:
        max_merged_tokens: Largest image, in merged tokens of 28 x 28 pixels; larger ones are
            scaled down, as vision processors do.
    """
    sizes = (line.split(",") for line in _lines("sroie_receipts_wh.csv"))
    return [image_patches(int(w), int(h), max_merged_tokens=max_merged_tokens) for w, h in sizes]


def image_patches(width: int, height: int, *, max_merged_tokens: int = 16384) -> int:
    """Return the patches of an image of `width` x `height` pixels (the rule of the traces)."""
    sides = [max(MERGED_PIXELS, round(s / MERGED_PIXELS) * MERGED_PIXELS) for s in (width, height)]
    limit = max_merged_tokens * MERGED_PIXELS**2
    if math.prod(sides) > limit:
        scale = math.sqrt(width * height / limit)
        sides = [
            max(MERGED_PIXELS, math.floor(s / scale / MERGED_PIXELS) * MERGED_PIXELS)
            for s in (width, height)
        ]
    return math.prod(side // PATCH_PIXELS for side in sides)


def receipts_samples(
    n: int, rng: random.Random, patches: Sequence[int], *, max_images: int = 3
) -> list[list[int]]:
    """Return the patch counts of the images of `n` samples, 0 to `max_images` images each.

    Args:
        n: Number of samples.
        rng: Source of randomness.
        patches: Patches per image to draw from (`receipt_patches()`).
        max_images: Most images of a sample.
    """
    return [rng.choices(patches, k=rng.randint(0, max_images)) for _ in range(n)]


def long_lengths(n: int, rng: random.Random, *, longest: int = LONG_MAX) -> list[int]:
    """Return `n` lengths in tokens of the *long* distribution.

    Args:
        n: Number of lengths.
        rng: Source of randomness.
        longest: Longer draws are drawn again ("shorter samples only").
    """
    lengths: list[int] = []
    while len(lengths) < n:
        drawn = round(rng.lognormvariate(LONG_MU, LONG_SIGMA))
        length = min(LONG_MAX, max(LONG_MIN, drawn))
        if length <= longest:
            lengths.append(length)
    return lengths


def _lines(name: str) -> list[str]:
    path = traces_folder() / name
    if not path.is_file():
        raise FileNotFoundError(
            f"the trace {path} is missing; pass --traces FOLDER or set {TRACES_VARIABLE}"
        )
    return path.read_text(encoding="utf-8").split()
