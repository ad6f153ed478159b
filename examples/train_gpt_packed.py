"""Train a small Megatron-Core GPT on real text: unpacked, packed, and packed in balance.

uv run torchrun --standalone --nproc-per-node 2 examples/train_gpt_packed.py

The three runs start from the same seed, read the same documents and take the same steps, so their
losses agree. See `gpt.train.train_step` for what packing adds to a training loop.
"""

import sys

from rich.console import Console

from command_line import OptionError
from gpt.options import Options, parse_options
from vlm.ranks import Ranks, agreed, joined_ranks


def main() -> None:
    """Check the options on all ranks, then compare."""
    try:
        parsed: Options | OptionError = parse_options(sys.argv[1:])
    except OptionError as error:
        parsed = error
    with joined_ranks() as ranks:
        if isinstance(parsed, Options) and ranks.num_ranks % parsed.context_parallel:
            parsed = OptionError(
                f"--context-parallel is {parsed.context_parallel}: must divide the "
                f"{ranks.num_ranks} ranks"
            )
        compare(agreed(parsed, ranks), ranks)


def compare(options: Options, ranks: Ranks) -> None:
    """Train three ways; rank 0 prints the table and saves the picture."""
    # Megatron-Core prints a dozen warnings when it is imported: not before --help and errors.
    from gpt.groups import Parallelism, model_groups  # noqa: PLC0415
    from gpt.report import results_table, save_picture  # noqa: PLC0415
    from gpt.train import ONE_BY_ONE, train  # noqa: PLC0415
    from vlm.report import count_steps  # noqa: PLC0415

    console = Console(quiet=ranks.rank != 0)
    console.print(f"ranks: {ranks.num_ranks} ({ranks.device.type}), steps: {options.steps}")
    groups = model_groups(Parallelism(context=options.context_parallel))
    runs = [
        train(
            scheduler,
            options,
            groups,
            ranks.device,
            count_steps(scheduler, options.steps, console),
        )
        for scheduler in (ONE_BY_ONE, "dp_balanced", "evenstep_balanced")
    ]
    if ranks.rank == 0:
        console.print(results_table(runs))
        save_picture(runs, options.picture)
        console.print(f"Packs per rank: {options.picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
