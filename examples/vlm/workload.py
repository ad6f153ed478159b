"""Made-up samples whose sizes follow real traces, the same on every machine.

The contents are made up, but there is something to learn: each sample has a topic; its patches
show the topic as a pattern under noise, and its words follow Zipf's law, shifted by the topic.
"""

import dataclasses
import math
import random
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from vlm.layout import (
    FIRST_WORD,
    IMAGE_START,
    IMAGE_TOKEN,
    MERGE_SIDE,
    NUM_WORDS,
    PADDING,
    PATCH_DIM,
    Batch,
    Images,
)
from vlm.traces import (
    CONVERSATION_TOKENS,
    MAX_MERGED_TOKENS,
    ImageSize,
    image_grid,
    quantile,
    receipt_size,
)

MAX_IMAGES = 3  # a sample has 0 to MAX_IMAGES images, each number as often
MIN_TEXT_TOKENS = 4
NUM_TOPICS = 8
TOPIC_SHIFT = 61  # words by which the vocabulary of two neighbouring topics differs
SEQUENCE_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """An endless stream of samples; sample i depends on the seed and on i alone."""

    seed: int
    scale: int
    """Patches and text tokens of the traces are divided by this."""
    image_sizes: tuple[ImageSize, ...] = ()
    """The images to draw from; empty draws from the built-in table of receipts."""

    @cached_property
    def sequence_length(self) -> int:
        """Tokens that every sample is padded to: no sample can be longer."""
        images = MAX_IMAGES * (1 + math.ceil(MAX_MERGED_TOKENS / self.scale))
        longest = images + math.ceil(CONVERSATION_TOKENS[-1] / self.scale) + MIN_TEXT_TOKENS
        return math.ceil(longest / SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE

    @cached_property
    def patterns(self) -> Tensor:
        """What a patch of each topic shows, float32 [NUM_TOPICS, PATCH_DIM]."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(NUM_TOPICS, PATCH_DIM, generator=generator)

    def micro_batches(
        self, *, rank: int, num_ranks: int, batch_size: int, num_batches: int
    ) -> Iterator[Batch]:
        """Yield one rank's micro-batches: its `batch_size` samples of each global batch."""
        for step in range(num_batches):
            first = (step * num_ranks + rank) * batch_size
            yield self.micro_batch(range(first, first + batch_size))

    def micro_batch(self, indices: range) -> Batch:
        """Build the micro-batch of these samples."""
        samples = [self._draw(index) for index in indices]
        tokens = torch.full((len(samples), self.sequence_length), PADDING)
        positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
        loss_mask = torch.zeros(tokens.shape)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
            positions[:, row, : len(sample.tokens)] = sample.positions
            loss_mask[row, sample.answer_start - 1 : len(sample.tokens) - 1] = 1.0
        grids = [(1, *grid) for sample in samples for grid in sample.grids]
        images: Images = {
            "hidden_states": torch.cat([sample.patches for sample in samples]),
            "grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        }
        return {
            "sample_index": torch.tensor(indices),
            "input_ids": tokens,
            "labels": torch.roll(tokens, -1, dims=1),
            "loss_mask": loss_mask,
            "attention_mask": tokens != PADDING,
            "position_ids": positions,
            "modality_inputs": {"images": {"clip": images}},
        }

    def _draw(self, index: int) -> "_Sample":
        chance = random.Random(f"{self.seed}/{index}")
        generator = torch.Generator().manual_seed(chance.getrandbits(63))
        sizes = [self._image_size(chance) for _ in range(chance.randint(0, MAX_IMAGES))]
        grids = [image_grid(size, scale=self.scale) for size in sizes]
        topic = chance.randrange(NUM_TOPICS)
        text_tokens = quantile(CONVERSATION_TOKENS, chance.random()) / self.scale
        words = _words(max(MIN_TEXT_TOKENS, round(text_tokens)), topic, generator)
        num_patches = sum(rows * columns for rows, columns in grids)
        noise = torch.randn(num_patches, PATCH_DIM, generator=generator)
        return _Sample(grids=grids, words=words, patches=noise + self.patterns[topic])

    def _image_size(self, chance: random.Random) -> ImageSize:
        if self.image_sizes:
            return chance.choice(self.image_sizes)
        return receipt_size(chance.random(), chance.random())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sample:
    grids: list[tuple[int, int]]
    words: Tensor
    patches: Tensor

    @cached_property
    def tokens(self) -> Tensor:
        """The images first, then the text: int64 [tokens]."""
        images = [
            torch.tensor([IMAGE_START] + [IMAGE_TOKEN] * (rows * columns // MERGE_SIDE**2))
            for rows, columns in self.grids
        ]
        return torch.cat([*images, self.words])

    @property
    def answer_start(self) -> int:
        """The first half of the text is the prompt; the loss is on the second."""
        return len(self.tokens) - len(self.words) // 2

    @cached_property
    def positions(self) -> Tensor:
        """Time, row and column of each token, as in Qwen2-VL: int64 [3, tokens].

        A word has one number on all axes. An image stands still in time, its rows and columns
        count on from there, and what follows starts above the largest number so far.
        """
        parts, start = [], 0
        for rows, columns in ((r // MERGE_SIDE, c // MERGE_SIDE) for r, c in self.grids):
            axes = [torch.arange(size) for size in (1, rows, columns)]
            image = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1)
            parts += [torch.full((3, 1), start), image + start + 1]
            start += 1 + max(rows, columns)
        parts.append(torch.arange(start, start + len(self.words)).expand(3, -1))
        return torch.cat(parts, dim=1)


def _words(count: int, topic: int, generator: torch.Generator) -> Tensor:
    """Draw words log-uniformly, so that the n-th most frequent is about 1/n as frequent."""
    rank = NUM_WORDS ** torch.rand(count, generator=generator)
    return FIRST_WORD + (rank.long() - 1 + topic * TOPIC_SHIFT) % NUM_WORDS
