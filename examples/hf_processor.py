"""A Hugging Face processor's micro-batches, balanced: Qwen2-VL's image processor, no download.

uv run torchrun --standalone --nproc-per-node 2 examples/hf_processor.py

Each sample is a text with zero to three images. Its input ids and labels carry the sample's number,
so that what arrives can be compared with what the processor makes of that very sample.
"""

import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from evenstep.reorder_buffer import (
    ImageCost,
    MicroBatch,
    TextAndImageCost,
    WindowStats,
    balance_loader,
    hf_vision_layout,
)

STEPS, BATCH_SIZE, LENGTH = 6, 4, 640
IMAGE_TOKEN, FIRST_NUMBER = 7, 100
PATCH_ELEMENTS = 3 * 2 * 14 * 14  # as Qwen2-VL lays a patch out: colours, frames, height, width

processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=150 * 28 * 28)


def images_of(number: int) -> list[Image.Image]:
    """Return the images of one sample."""
    rng = random.Random(number)
    sizes = [(rng.randint(60, 400), rng.randint(60, 800)) for _ in range(rng.randint(0, 3))]
    return [Image.new("RGB", size, (rng.randrange(256), number % 256, 0)) for size in sizes]


def processed(numbers: list[int]) -> MicroBatch:
    """Return the micro-batch of these samples, as the processor and a collate function make it."""
    images: list[Image.Image] = []
    ids = torch.empty(len(numbers), LENGTH, dtype=torch.int64)
    for row, number in zip(ids, numbers, strict=True):
        own = images_of(number)
        images += own
        row[:] = FIRST_NUMBER + number
        if own:
            grid = processor(own, return_tensors="pt")["image_grid_thw"]
            row[: int(grid.prod(1).sum()) // processor.merge_size**2] = IMAGE_TOKEN
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    return {**batch, **processor(images, return_tensors="pt")} if images else batch


def batches_of(rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    for step in range(STEPS):
        first = (step * num_ranks + rank) * BATCH_SIZE
        yield processed([*range(first, first + BATCH_SIZE)])


def main() -> None:
    dist.init_process_group("gloo")
    windows: list[WindowStats] = []
    batches = balance_loader(
        batches_of(dist.get_rank(), dist.get_world_size()),
        TextAndImageCost(image_weight=3.0, image=ImageCost(elements_per_patch=PATCH_ELEMENTS)),
        layout=hf_vision_layout(
            image_token_id=IMAGE_TOKEN, spatial_merge_size=processor.merge_size
        ),
        on_window=windows.append,
    )
    with batches:
        for batch in batches:
            numbers = (batch["labels"][:, -1] - FIRST_NUMBER).tolist()
            alone = processed(numbers)
            assert batch.keys() == alone.keys()
            for key, value in alone.items():
                assert torch.equal(batch[key], value), key
    if dist.get_rank() == 0:
        slots = [slot for window in windows for slot in window.slots]
        mean = sum(slot.before_mean for slot in slots)
        before = sum(slot.before_max for slot in slots) / mean
        after = sum(slot.after_max for slot in slots) / mean
        print(f"{len(slots)} steps, every sample as the processor made it")
        print(f"largest / mean load: {before:.2f} as it comes, {after:.2f} balanced")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
