"""Train a small vision-language model as the data comes and balanced, and compare.

uv run torchrun --standalone --nproc-per-node 2 examples/train_vlm.py

Both runs start from the same seed, read the same samples and take the same steps; the second puts
a `ReorderingBuffer` in front of the loader. `balance` is all that this adds to a training script.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from command_line import OptionError
from evenstep.reorder_buffer import (
    OnWindow,
    ReorderingBuffer,
    SampleCost,
    WindowStats,
    build_module_dp_process_groups,
)
from vlm.layout import (
    IMAGE_TOKEN,
    MERGE_SIDE,
    Batch,
    images_per_sample,
    patches_per_sample,
    to_device,
)
from vlm.model import VisionLanguageModel, training_gflop
from vlm.options import Options, parse_options
from vlm.ranks import Ranks, agreed, joined_ranks
from vlm.record import RunRecord, StepRecord, gather_run
from vlm.report import count_steps, results_table, save_picture
from vlm.workload import Workload

WARM_UP_STEPS = 2  # the first steps of a process are slow, whatever it trains


def main() -> None:
    """Train both ways; rank 0 prints the table and saves the picture."""
    try:
        parsed: Options | OptionError = parse_options(sys.argv[1:])
    except OptionError as error:
        parsed = error
    with joined_ranks() as ranks:
        options = agreed(parsed, ranks)
        console = Console(quiet=ranks.rank != 0)
        console.print(f"ranks: {ranks.num_ranks} ({ranks.device.type}), steps: {options.steps}")

        warm_up = dataclasses.replace(options, steps=WARM_UP_STEPS)
        train("warm-up", open_loader(warm_up, ranks), warm_up, ranks, Console(quiet=True))
        plain = train("as it comes", open_loader(options, ranks), options, ranks, console)

        windows: list[WindowStats] = []
        batches = balance(open_loader(options, ranks), options, windows.append)
        balanced = train("balanced", batches, options, ranks, console)

        if ranks.rank == 0:
            exchange_s = sum(exchange_seconds(window) for window in windows) / options.steps
            console.print(results_table(plain, balanced, exchange_s))
            save_picture(plain, balanced, options.picture)
            console.print(f"Load per rank: {options.picture}", soft_wrap=True)


def balance(batches: Iterator[Batch], options: Options, on_window: OnWindow) -> Iterator[Batch]:
    """Put the reordering buffer in front of a loader: all that evenstep adds to a training run."""
    encoder_gflop, language_gflop = training_gflop(VisionLanguageModel(options.model))
    assert dist.group.WORLD is not None  # joined_ranks has made it
    dp_rank, dp_size, gloo, nccl = build_module_dp_process_groups(
        dist.group.WORLD, overlap=options.overlap
    )
    return ReorderingBuffer(
        batches,
        dp_rank=dp_rank,
        dp_size=dp_size,
        n_groups=dp_size,
        cost_of=SampleCost(
            encoder_cost_weight=encoder_gflop,
            language_cost_weight=language_gflop,
            image_token_id=IMAGE_TOKEN,
            square_merge_size=MERGE_SIDE**2,
        ),
        dp_group_gloo=gloo,
        dp_group_nccl=nccl,
        overlap=options.overlap,
        image_count_of=images_per_sample,
        window_size=options.window,
        on_window=on_window,
    )


def train(
    name: str, batches: Iterator[Batch], options: Options, ranks: Ranks, console: Console
) -> RunRecord:
    """Train from the seed on `batches`."""
    torch.manual_seed(options.seed)
    model = VisionLanguageModel(options.model).to(ranks.device)
    gflop = training_gflop(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.learning_rate)
    records = []
    for _ in count_steps(name, options.steps, console):
        start = time.perf_counter()
        batch = next(batches)
        wait_s = time.perf_counter() - start
        loss_sum, loss_tokens = train_step(ddp, optimizer, to_device(batch, ranks.device), ranks)
        step_s = time.perf_counter() - start
        home_rank = batch["sample_index"] // options.batch_size % ranks.num_ranks
        records.append(
            StepRecord(
                step_s=step_s,
                wait_s=wait_s,
                load_gflop=load_of(batch, gflop),
                samples=len(home_rank),
                moved_samples=int((home_rank != ranks.rank).sum()),
                loss_sum=loss_sum,
                loss_tokens=loss_tokens,
            )
        )
    return gather_run(records, ranks)


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: Batch, ranks: Ranks
) -> tuple[float, float]:
    """Take one optimizer step; return this rank's summed loss and the tokens it is summed over.

    The gradient is that of the mean over the tokens of the *global* batch. A mean over each rank's
    own tokens would weigh a token by the rank it was sent to, and balancing would change the model.
    """
    loss_tokens = batch["loss_mask"].sum()
    global_tokens = loss_tokens.clone()
    dist.all_reduce(global_tokens)
    loss_sum = model(batch)
    # DistributedDataParallel divides the sum of the ranks' gradients by their number.
    (loss_sum * ranks.num_ranks / global_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum.item(), loss_tokens.item()  # `item` waits until a GPU has finished the step


def load_of(batch: Batch, gflop: tuple[float, float]) -> float:
    """Return the work of a micro-batch in GFLOP, given that of a patch and of a token."""
    patches = int(patches_per_sample(batch).sum())
    tokens = int(batch["attention_mask"].sum())
    return patches * gflop[0] + tokens * gflop[1]


def exchange_seconds(window: WindowStats) -> float:
    """Return what the exchange of a window took on this rank, reading and costing left out."""
    seconds = window.seconds
    return seconds.control + seconds.pack + seconds.transfer + seconds.merge


def open_loader(options: Options, ranks: Ranks) -> Iterator[Batch]:
    """Start this rank's share of the stream from its beginning."""
    workload = Workload(seed=options.seed, scale=options.scale, image_sizes=options.image_sizes)
    return workload.micro_batches(
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        batch_size=options.batch_size,
        num_batches=options.steps,
    )


if __name__ == "__main__":
    main()
