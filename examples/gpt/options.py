"""The command line of `train_gpt_packed.py`; every option is checked before anything is started."""

import argparse
import dataclasses
from pathlib import Path

from command_line import (
    Parser,
    require,
    require_learning_rate,
    require_width,
    writable_picture,
)
from gpt.size import ModelSize

DESCRIPTION = """
Train a small Megatron-Core GPT on the sources of Python's standard library, byte by byte, three
times from the same seed: one document per micro-batch, packed as Megatron-Core's dp_balanced does,
and packed by evenstep_balanced. Start it with torchrun, on any number of ranks.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked options; see `--help`."""

    steps: int
    documents_per_rank: int
    tokens_per_rank: int
    longest: int
    context_parallel: int
    model: ModelSize
    learning_rate: float
    seed: int
    picture: Path


def parse_options(arguments: list[str]) -> Options:
    """Parse and check the command line.

    Raises:
        OptionError: If an option cannot work.
    """
    given = _parser().parse_args(arguments)
    for name in ("steps", "documents_per_rank", "layers", "context_parallel", "tokens_per_rank"):
        option = f"--{name.replace('_', '-')}"
        require(getattr(given, name) >= 1, f"{option} is {getattr(given, name)}: at least 1")
    require_width(given.width, 16)
    padding = 2 * given.context_parallel
    capacity = given.tokens_per_rank * given.context_parallel
    require(given.longest >= 17, f"--longest is {given.longest}: at least 17 bytes")
    require(
        given.longest + padding <= capacity,
        f"--tokens-per-rank is {given.tokens_per_rank}: times --context-parallel it must hold the "
        f"longest document, {given.longest} bytes and up to {padding} of padding",
    )
    require_learning_rate(given.learning_rate)
    return Options(
        steps=given.steps,
        documents_per_rank=given.documents_per_rank,
        tokens_per_rank=given.tokens_per_rank,
        longest=given.longest,
        context_parallel=given.context_parallel,
        model=ModelSize(
            layers=given.layers,
            hidden=given.width,
            heads=given.width // 16,
            positions=given.longest + padding,
        ),
        learning_rate=given.learning_rate,
        seed=given.seed,
        picture=writable_picture(given.picture),
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchrun --standalone --nproc-per-node 2 examples/train_gpt_packed.py",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, help="optimizer steps of each run")
    add("--documents-per-rank", type=int, default=16, help="documents that a rank reads per step")
    add("--tokens-per-rank", type=int, default=4096, help="tokens that a rank may hold at a time")
    add("--longest", type=int, default=2000, help="documents are cut after this many bytes")
    add("--context-parallel", type=int, default=1, help="ranks that share each document")
    add("--width", type=int, default=64, help="model width, a multiple of 16")
    add("--layers", type=int, default=2, help="transformer layers")
    add("--learning-rate", type=float, default=1e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=1234, help="seed of the weights and of the documents' order")
    add(
        "--picture",
        type=Path,
        default=Path("out/train_gpt_packed.png"),
        metavar="FILE",
        help="where to save the picture of the packs per rank, a PNG",
    )
    return parser
