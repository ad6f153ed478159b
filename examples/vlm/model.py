"""A small vision-language model whose work is in exact proportion to patches and tokens.

Nothing is padded inside: the samples of a micro-batch lie end to end, and attention is computed
segment by segment. So the cost of a sample is the time it takes, wherever it is computed.

The shape follows Qwen2.5-VL: patches attend within windows and, in the last block, within their
image; squares of 2 x 2 patches become image tokens; both towers use rotary positions, with two
axes (row, column) in the encoder and three (time, row, column) in the language model.
"""

import dataclasses
import itertools

import torch
from torch import Tensor, nn

from vlm.layout import (
    IMAGE_TOKEN,
    MERGE_SIDE,
    PATCH_DIM,
    VOCABULARY_SIZE,
    Batch,
    Images,
    images_of,
    patch_coordinates,
)

HEAD_DIM = 64
WINDOW_PATCHES = 64  # as many as an 8 x 8 window of Qwen2.5-VL
BACKWARD_FACTOR = 3  # a training step: one forward pass, and a backward pass of twice its work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The size of both towers."""

    width: int = 192
    """Features of a patch or token; a multiple of HEAD_DIM."""
    depth: int = 4
    """Transformer blocks in each tower."""


class Block(nn.Module):
    """A pre-norm transformer block over tokens that lie end to end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, angles: Tensor, segments: list[int], *, causal: bool) -> Tensor:
        """Transform tokens that see only their own segment.

        Args:
            x: float [tokens, width].
            angles: Rotary angles, float [tokens, HEAD_DIM / 2].
            segments: Lengths of the segments; their sum is `tokens`.
            causal: Whether a token sees only those before it.

        Returns:
            float [tokens, width].
        """
        qkv = self.qkv(self.attention_norm(x)).unflatten(1, (3, -1, HEAD_DIM))
        q, k, v = qkv.unbind(dim=1)
        mixed = attend(rotate(q, angles), rotate(k, angles), v, segments, causal=causal)
        x = x + self.attention_out(mixed.flatten(1))
        update: Tensor = self.mlp(self.mlp_norm(x))
        return x + update


def attend(q: Tensor, k: Tensor, v: Tensor, segments: list[int], *, causal: bool) -> Tensor:
    """Attend within each segment; all tensors are [tokens, heads, HEAD_DIM]."""
    mixed = [v[:0]]  # keeps the graph whole where a micro-batch has no image at all
    for parts in zip(*(torch.split(x, segments) for x in (q, k, v)), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        segment = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        mixed.append(segment[0].transpose(0, 1))
    return torch.cat(mixed)


def rotary_angles(positions: Tensor) -> Tensor:
    """Return the rotation of each pair of features: the axes take turns over the frequencies.

    Args:
        positions: int64 [axes, tokens].

    Returns:
        float32 [tokens, HEAD_DIM / 2].
    """
    pairs = torch.arange(HEAD_DIM // 2, device=positions.device)
    frequencies = 10_000.0 ** (-pairs / len(pairs))
    return positions[pairs % len(positions)].T * frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs of features of [tokens, heads, HEAD_DIM] by [tokens, HEAD_DIM / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class VisionEncoder(nn.Module):
    """Turns the patches of any number of images into image tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH_DIM, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        merged = config.width * MERGE_SIDE**2
        self.merge = nn.Sequential(
            nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.width)
        )

    def forward(self, images: Images) -> Tensor:
        """Return float [patches / MERGE_SIDE**2, width], image by image."""
        grids = images["grid_thw"].tolist()
        patches = images["hidden_states"]
        sizes = [rows * columns for _, rows, columns in grids]
        windows = [size for count in sizes for size in window_sizes(count)]
        coordinates = [patch_coordinates(rows, columns) for _, rows, columns in grids]
        empty = torch.empty(2, 0, dtype=torch.int64)
        angles = rotary_angles(torch.cat([empty, *coordinates], dim=1).to(patches.device))
        x = self.embed(patches)
        for block in self.blocks:
            last = block is self.blocks[-1]
            x = block(x, angles, sizes if last else windows, causal=False)
        tokens: Tensor = self.merge(self.norm(x).view(-1, self.merge[0].in_features))
        return tokens


def window_sizes(patches: int) -> list[int]:
    """Cut an image into windows of WINDOW_PATCHES consecutive patches; the last may be shorter."""
    starts = range(0, patches, WINDOW_PATCHES)
    return [min(WINDOW_PATCHES, patches - start) for start in starts]


class VisionLanguageModel(nn.Module):
    """Reads images and text, and predicts the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = VisionEncoder(config)
        self.embed = nn.Embedding(VOCABULARY_SIZE, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY_SIZE, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss summed over the tokens that count, float32 [] (see `loss_mask`)."""
        real = batch["attention_mask"]
        tokens = batch["input_ids"][real]
        is_image = tokens == IMAGE_TOKEN
        x = self.embed(tokens).index_put((is_image,), self.encoder(images_of(batch)))
        angles = rotary_angles(batch["position_ids"][:, real])
        lengths = real.sum(dim=1).tolist()
        for block in self.blocks:
            x = block(x, angles, lengths, causal=True)
        logits = self.head(self.norm(x))
        losses = nn.functional.cross_entropy(logits, batch["labels"][real], reduction="none")
        return (losses * batch["loss_mask"][real]).sum()


def training_gflop(model: VisionLanguageModel) -> tuple[float, float]:
    """Return the work of one training step per patch and per token, in GFLOP.

    Two operations per weight of each matrix product, and 4 * width * WINDOW_PATCHES per patch for
    the windows. Left out, being small at the lengths here: attention over whole images in the
    last block of the encoder, and over the sample's tokens in the language model.
    """

    def products(module: nn.Module) -> int:
        layers = (part for part in module.modules() if isinstance(part, nn.Linear))
        return 2 * sum(layer.weight.numel() for layer in layers)

    encoder = model.encoder
    towers = itertools.chain(encoder.blocks, [encoder.embed])
    windows = 4 * encoder.norm.weight.numel() * WINDOW_PATCHES * len(encoder.blocks)
    per_patch = sum(map(products, towers)) + windows + products(encoder.merge) / MERGE_SIDE**2
    per_token = products(model.blocks) + products(model.head)
    return BACKWARD_FACTOR * per_patch / 1e9, BACKWARD_FACTOR * per_token / 1e9
