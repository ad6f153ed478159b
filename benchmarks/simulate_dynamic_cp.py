"""Draw a step of dynamic context parallelism, and compare step times under prices of communication.

The picture has ranks down and load along, coloured by CP size; white is waiting, and dashed lines
are the barriers between micro-batches. Above our planner, below buckets in the manner of
Megatron-Core's `default_dynamic_cp`. The table adds the smallest fixed CP that holds the longest
sequence. Loads are L + L * L / (12 * 4096), over the ideal: total load / ranks, no communication.
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

mpl.use("Agg")  # no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.balance_packing import LOAD
from benchmarks.workloads import (
    TRACES_VARIABLE,
    conversation_tokens,
    long_lengths,
    traces_folder,
)
from evenstep.balance import (
    DynamicCpPlan,
    DynamicCpStrategy,
    SequenceLoad,
    plan_dynamic_cp,
    plan_packing,
)

PRICES = (0.0, 0.005, 0.02, 0.1, 0.5)

NAMES: dict[DynamicCpStrategy, str] = {
    "balanced": "evenstep_dynamic_cp",
    "bucketed": "default_dynamic_cp (our reading)",
}


def main() -> None:
    """Draw the picture, print the table."""
    options = _options()
    os.environ[TRACES_VARIABLE] = str(options.traces)
    lengths = _lengths(options.workload, options.sequences, options.seed)
    _print_prices(lengths, options.ranks, options.tokens_per_rank)
    plans = {
        name: _plan(lengths, options.ranks, options.tokens_per_rank, options.price, strategy)
        for strategy, name in NAMES.items()
    }
    title = (
        f"{options.sequences} sequences ({options.workload}) on {options.ranks} ranks of "
        f"{options.tokens_per_rank} tokens, communication at {options.price} per token and step"
    )
    draw(plans, title, options.out)
    print(f"picture: {options.out}")


def draw(plans: dict[str, DynamicCpPlan], title: str, path: Path) -> None:
    """Draw plans of the same lengths below each other, on one scale, and save them."""
    figure, rows = plt.subplots(len(plans), 1, figsize=(11, 3.4 * len(plans)), sharex=True)
    for axes, (name, plan) in zip(rows, plans.items(), strict=True):
        _draw_plan(axes, plan)
        axes.set_title(
            f"{name}: {plan.num_microbatches} micro-batches, step / ideal "
            f"{plan.step_load / plan.ideal_load:.3f}, mean CP {plan.mean_cp_size:.2f}",
            loc="left",
            fontsize=10,
        )
    sizes = sorted({g.size for p in plans.values() for groups in p.microbatches for g in groups})
    ranks = next(iter(plans.values())).num_ranks
    handles = [Patch(color=_colour(size, ranks), label=f"CP {size}") for size in sizes]
    rows[-1].set_xlabel("load")
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.tight_layout(rect=(0, 0, 0.92, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_plan(axes: Axes, plan: DynamicCpPlan) -> None:
    begin = 0.0
    for groups, longest in zip(plan.microbatches, plan.max_loads, strict=True):
        boxes = [Rectangle((begin, g.start), g.load, g.size) for g in groups]
        colours = [_colour(g.size, plan.num_ranks) for g in groups]
        axes.add_collection(
            PatchCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.4)
        )
        begin += longest
        axes.axvline(begin, color="black", linewidth=0.7, linestyle=(0, (4, 3)))
    axes.axvline(plan.ideal_load, color="crimson", linewidth=1.2)
    axes.text(plan.ideal_load, -0.01 * plan.num_ranks, "ideal ", color="crimson", ha="right")
    axes.set_xlim(0, None)
    axes.set_ylim(plan.num_ranks, 0)
    axes.set_ylabel("rank")


def _colour(size: int, num_ranks: int) -> tuple[float, float, float, float]:
    """Return a colour, from pale for a rank alone to dark for all ranks."""
    share = (size.bit_length() - 1) / max(1, num_ranks.bit_length() - 1)
    colour: tuple[float, float, float, float] = plt.get_cmap("viridis_r")(0.08 + 0.84 * share)
    return colour


def _plan(
    lengths: Sequence[int],
    num_ranks: int,
    tokens_per_rank: int,
    price: float,
    strategy: DynamicCpStrategy,
) -> DynamicCpPlan:
    return plan_dynamic_cp(
        lengths,
        tokens_per_rank=tokens_per_rank,
        num_ranks=num_ranks,
        load=LOAD,
        communication=price,
        strategy=strategy,
    )


def _fixed_over_ideal(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, price: float, cp_size: int
) -> float:
    """Return step / ideal of packing at one CP size, its communication included."""
    priced = SequenceLoad(
        linear=float(LOAD.linear) + price * (cp_size - 1), quadratic=LOAD.quadratic
    )
    plan = plan_packing(
        lengths,
        capacity=tokens_per_rank * cp_size,
        num_ranks=num_ranks // cp_size,
        load=priced,
    )
    return plan.step_load / cp_size / (sum(map(LOAD.of, lengths)) / num_ranks)


def _print_prices(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int) -> None:
    cp_size = 1
    while cp_size < num_ranks and cp_size * tokens_per_rank < max(lengths):
        cp_size *= 2
    table = Table(title="step / ideal, mean CP size in brackets")
    table.add_column("price per token and step")
    for name in (*NAMES.values(), f"fixed CP {cp_size}"):
        table.add_column(name, justify="right")
    for price in PRICES:
        plans = [_plan(lengths, num_ranks, tokens_per_rank, price, s) for s in NAMES]
        fixed = _fixed_over_ideal(lengths, num_ranks, tokens_per_rank, price, cp_size)
        cells = [f"{p.step_load / p.ideal_load:.3f} ({p.mean_cp_size:.2f})" for p in plans]
        table.add_row(f"{price:g}", *cells, f"{fixed:.3f}")
    Console().print(table)


def _lengths(workload: str, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return (
        rng.sample(conversation_tokens(), count) if workload == "conv" else long_lengths(count, rng)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--workload", choices=("conv", "long"), default="long", help="distribution of lengths")
    add("--sequences", type=int, default=1024, help="sequences of the global batch")
    add("--ranks", type=int, default=64, help="data- times context-parallel ranks")
    add("--tokens-per-rank", type=int, default=8192, help="tokens that a rank may hold at a time")
    add("--price", type=float, default=0.02, help="price of communication in the picture")
    add("--seed", type=int, default=0, help="which draw of lengths")
    add("--out", type=Path, default=Path("dynamic-cp.png"), help="where the picture goes")
    add("--traces", type=Path, default=traces_folder(), help="folder of the traces")
    options = parser.parse_args()
    options.traces = options.traces.resolve()
    if not options.traces.is_dir():
        parser.error(f"the traces' folder {options.traces} is missing; pass --traces FOLDER")
    return options


if __name__ == "__main__":
    main()
