"""The command line of `train_vlm.py`; every option is checked before anything is started."""

import argparse
import dataclasses
from pathlib import Path

from command_line import (
    OptionError,
    Parser,
    require,
    require_learning_rate,
    require_width,
    writable_picture,
)
from vlm.model import HEAD_DIM, ModelConfig
from vlm.traces import ImageSize, read_image_sizes

DESCRIPTION = """
Train a small vision-language model twice from the same seed: as the data comes, and with every
micro-batch balanced over the ranks. Start it with torchrun, on any number of ranks: it uses GPUs
where each rank has its own, and CPU cores otherwise. Without torchrun it runs as a single rank,
which has nobody to share work with.
"""
SOURCES = """
The built-in tables of sizes: patches of the scanned receipts of ICDAR 2019 SROIE, and tokens per
request of the Azure LLM inference trace 2023, conversation (AzurePublicDataset, CC BY 4.0).
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked options; see `--help`."""

    steps: int
    batch_size: int
    window: int
    overlap: bool
    scale: int
    model: ModelConfig
    learning_rate: float
    seed: int
    image_sizes: tuple[ImageSize, ...]
    picture: Path


def parse_options(arguments: list[str]) -> Options:
    """Parse and check the command line.

    Raises:
        OptionError: If an option cannot work.
    """
    given = _parser().parse_args(arguments)
    for name in ("steps", "window", "scale", "depth"):
        require(getattr(given, name) >= 1, f"--{name} is {getattr(given, name)}: at least 1")
    require(
        given.batch_size >= 2,
        f"--batch-size is {given.batch_size}: at least 2, as ranks with one sample each could "
        "only swap them",
    )
    require(
        given.steps % given.window == 0,
        f"--window is {given.window}: must divide --steps, which is {given.steps}",
    )
    require_width(given.width, HEAD_DIM)
    require_learning_rate(given.learning_rate)
    require(given.seed >= 0, f"--seed is {given.seed}: at least 0")
    return Options(
        model=ModelConfig(width=given.width, depth=given.depth),
        image_sizes=_image_sizes(getattr(given, "trace", None)),
        picture=writable_picture(given.picture),
        steps=given.steps,
        batch_size=given.batch_size,
        window=given.window,
        overlap=given.overlap,
        scale=given.scale,
        learning_rate=given.learning_rate,
        seed=given.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchrun --standalone --nproc-per-node 2 examples/train_vlm.py",
        description=DESCRIPTION,
        epilog=SOURCES,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=int, default=40, help="optimizer steps of each of the two runs")
    add("--batch-size", type=int, default=4, help="samples per rank and step")
    add(
        "--window",
        type=int,
        default=1,
        help="steps whose micro-batches are exchanged together; each step is balanced by itself",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="exchange the next window while the current one is computed",
    )
    add(
        "--scale",
        type=int,
        default=64,
        help="divide the traces' patches and text tokens by this; 1 trains on real sizes",
    )
    add("--width", type=int, default=192, help=f"model width, a multiple of {HEAD_DIM}")
    add("--depth", type=int, default=4, help="blocks of the encoder and of the language model")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of AdamW")
    add("--seed", type=int, default=1234, help="seed of the weights and of the data")
    add(
        "--trace",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="draw images from this CSV file of width,height in pixels (default: a built-in table)",
    )
    add(
        "--picture",
        type=Path,
        default=Path("out/train_vlm.png"),
        metavar="FILE",
        help="where to save the picture of the load per rank, a PNG",
    )
    return parser


def _image_sizes(trace: Path | None) -> tuple[ImageSize, ...]:
    if trace is None:
        return ()
    try:
        return read_image_sizes(trace)
    except ValueError as error:
        raise OptionError(f"--trace: {error}") from error
