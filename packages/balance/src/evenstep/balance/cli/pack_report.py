"""How `pack` shows its plans: a table, JSON, a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import typer

from evenstep.balance.cli.draws import Draws
from evenstep.balance.cli.figures import Spread, ratio
from evenstep.balance.cli.plot import plot_loads
from evenstep.balance.cli.terminal import milliseconds, percent, print_plot, print_table
from evenstep.balance.packing_plan import PackingPlan
from evenstep.balance.synchronize import Synchronize

_HEAD = (
    "strategy",
    "bins\na step",
    "\nfill",
    "largest\n/ mean",
    "\np95",
    "\nworst",
    "gap to\nbound",
    "padding\nsaved",
    "time\nsaved",
    "plan\ntime",
)


class PackedStep(NamedTuple):
    """The plan of one step, and how long it took to make."""

    plan: PackingPlan
    planning_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What one strategy achieves over all steps.

    Attributes:
        strategy: Its name.
        steps: Its plans.
        bins: Bins of a step.
        fill: Part of the bins' capacity that holds tokens.
        largest_load: The largest load of a bin in a step.
        largest_over_mean: Largest over mean load of a rank, where ranks wait for each other.
        gap: How far the steps are above the lower bound, as a share of it.
        padding_saved: Part of the padding of an unpacked batch, whose sequences are all as long as
            the longest, that is gone. The room that is left in the bins counts as padding. None
            where the unpacked batch has no more padding than the bins: there is none to save.
        time_saved: Part of the time of all steps, packed in arrival order, that is saved.
        planning_s: Seconds to plan one step.
    """

    strategy: str
    steps: Sequence[PackedStep]
    bins: Spread
    fill: float
    largest_load: Spread
    largest_over_mean: Spread
    gap: Spread
    padding_saved: float | None
    time_saved: float
    planning_s: Spread

    @classmethod
    def of(
        cls, strategy: str, steps: Sequence[PackedStep], arrival: Sequence[PackedStep]
    ) -> "Packing":
        """Summarise the steps of one strategy, beside the same steps in arrival order."""
        plans = [step.plan for step in steps]
        tokens = sum(plan.tokens for plan in plans)
        padding = sum(plan.padding_tokens for plan in plans)
        unpacked = sum(plan.unpacked_padding_tokens for plan in plans)
        before = math.fsum(step.plan.step_load for step in arrival)
        return cls(
            strategy=strategy,
            steps=steps,
            bins=Spread.of([plan.num_microbatches * plan.num_ranks for plan in plans]),
            fill=tokens / (tokens + padding),
            largest_load=Spread.of([max(map(max, plan.bin_loads)) for plan in plans]),
            largest_over_mean=Spread.of([plan.step_load / plan.ideal_load for plan in plans]),
            gap=Spread.of([plan.gap for plan in plans]),
            padding_saved=1 - padding / unpacked if padding < unpacked else None,
            time_saved=1 - ratio(math.fsum(plan.step_load for plan in plans), before),
            planning_s=Spread.of([step.planning_s for step in steps]),
        )


def print_packings(draws: Draws, packings: Sequence[Packing], plot: Path | None) -> None:
    """Print the table, and the answer in one sentence."""
    plan = packings[0].steps[0].plan
    title = (
        f"{draws.describe()}: {draws.size:,} sequences a step into bins of {plan.capacity:,} "
        f"tokens for {plan.num_ranks} {'rank' if plan.num_ranks == 1 else 'ranks'}"
    )
    best = packings[-1]
    note = (
        f"Would it help? Balanced, the step takes {percent(best.time_saved)} less time than packed "
        f"in arrival order, as far as time follows the load; bins are {percent(best.fill)} full."
    )
    print_table(title, _HEAD, map(_row, packings), [note])
    print_plot(plot)


def print_json(about: Mapping[str, object], draws: Draws, packings: Sequence[Packing]) -> None:
    """Print one JSON object: shares as fractions of 1, times in seconds."""
    plan = packings[0].steps[0].plan
    result = {
        **about,
        "capacity": plan.capacity,
        "dp_size": plan.num_ranks,
        "global_batch": draws.size,
        "synchronize": plan.synchronize,
        "sequences": len(draws.values),
        "steps": len(draws),
        "steps_available": draws.available,
        "seed": draws.seed,
        "strategies": [
            {
                "strategy": packing.strategy,
                "bins": packing.bins._asdict(),
                "fill": packing.fill,
                "largest_load": packing.largest_load._asdict(),
                "largest_over_mean": packing.largest_over_mean._asdict(),
                "gap_to_bound": packing.gap._asdict(),
                "padding_saved": packing.padding_saved,
                "time_saved": packing.time_saved,
                "planning_s": packing.planning_s._asdict(),
            }
            for packing in packings
        ],
    }
    typer.echo(json.dumps(result))


def plot_packings(path: Path, packings: Sequence[Packing], synchronize: Synchronize) -> None:
    """Draw the loads of the step whose imbalance is the median in the first packing.

    Raises:
        UsageError: The file cannot be written.
    """
    plans = [step.plan for step in packings[0].steps]
    imbalance = [plan.step_load / plan.ideal_load for plan in plans]
    chosen = imbalance.index(median_low(imbalance))
    loads = {packing.strategy: packing.steps[chosen].plan.bin_loads for packing in packings}
    title = f"bins of {plans[0].capacity:,} tokens: the step of median imbalance"
    plot_loads(path, loads, title=title, synchronize=synchronize)


def _row(packing: Packing) -> list[str]:
    return [
        packing.strategy,
        f"{packing.bins.mean:.1f}",
        percent(packing.fill),
        *(f"{value:.3f}" for value in packing.largest_over_mean),
        percent(packing.gap.mean, 2),
        "-" if packing.padding_saved is None else percent(packing.padding_saved),
        percent(packing.time_saved),
        milliseconds(packing.planning_s.mean),
    ]
