"""How `simulate` shows its outcomes: a table, JSON, a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from evenstep.balance.cli.draws import Draws
from evenstep.balance.cli.plot import plot_loads
from evenstep.balance.cli.simulation import Contender, Outcome, Setting, Slots, loads_of
from evenstep.balance.cli.strategies import UNEQUAL
from evenstep.balance.cli.terminal import milliseconds, percent, print_plot, print_table

_HEAD = (
    "strategy",
    "largest\n/ mean",
    "\np95",
    "\nworst",
    "gap to\nbound",
    "cost\nmoved",
    "time\nsaved",
    "plan\ntime",
)

# Below this the cost of the exchange itself may be larger than what it saves.
_WORTHWHILE = 0.03

# Of strategies that save within this of the most, the one that moves least is named.
_AS_GOOD = 0.02


def print_outcomes(
    setting: Setting, draws: Draws, outcomes: Sequence[Outcome], plot: Path | None
) -> None:
    """Print the table, the answer, and where the picture is, if there is one."""
    as_read, *planned = outcomes
    rows = [
        _row(as_read)[:5] + ["-"] * 3,
        *(_row(outcome) for outcome in planned),
    ]
    print_table(_describe(setting, draws), _HEAD, rows, [_answer(setting, planned)])
    print_plot(plot)


def print_json(
    about: Mapping[str, object], setting: Setting, draws: Draws, outcomes: Sequence[Outcome]
) -> None:
    """Print one JSON object: shares as fractions of 1, times in seconds."""
    result = {
        **about,
        "dp_size": setting.dp_size,
        "micro_batch": setting.micro_batch,
        "window": setting.window,
        "synchronize": setting.synchronize,
        "samples": len(draws.values),
        "steps": len(draws),
        "steps_available": draws.available,
        "seed": draws.seed,
        "best": None if (best := _best(outcomes[1:])) is None else best.strategy,
        "strategies": [
            {
                "strategy": outcome.strategy,
                "largest_over_mean": outcome.largest_over_mean._asdict(),
                "gap_to_bound": outcome.gap._asdict(),
                "moved_share": outcome.moved_share,
                "time_saved": outcome.time_saved,
                "planning_s": outcome.planning_s._asdict(),
            }
            for outcome in outcomes
        ],
    }
    typer.echo(json.dumps(result))


def plot_step(
    path: Path, setting: Setting, contenders: Mapping[str, Contender], slots: Slots
) -> None:
    """Draw the loads of one step under every strategy.

    Raises:
        UsageError: The file cannot be written.
    """
    panels = {
        name: loads_of(slots, contender.plan(slots)) for name, contender in contenders.items()
    }
    title = f"{setting.describe()}: the step of median imbalance"
    plot_loads(path, panels, title=title, synchronize=setting.synchronize)


def _row(outcome: Outcome) -> list[str]:
    return [
        outcome.strategy,
        *(f"{value:.3f}" for value in outcome.largest_over_mean),
        percent(outcome.gap.mean, 2),
        percent(outcome.moved_share),
        percent(outcome.time_saved),
        milliseconds(outcome.planning_s.mean),
    ]


def _describe(setting: Setting, draws: Draws) -> str:
    waits = "every micro-batch" if setting.synchronize == "microbatch" else "only the step"
    return f"{draws.describe()}: {setting.describe()}; {waits} synchronises"


def _best(planned: Sequence[Outcome]) -> Outcome | None:
    """Return the strategy to take, None if none is worth its exchange."""
    if max(outcome.time_saved for outcome in planned) < _WORTHWHILE:
        return None
    # Equal counts suit every training loop; unequal ones are named only if nothing else is there.
    equal = [outcome for outcome in planned if outcome.strategy != UNEQUAL] or planned
    enough = max(outcome.time_saved for outcome in equal) - _AS_GOOD
    good = [outcome for outcome in equal if outcome.time_saved >= enough]
    return min(good, key=lambda outcome: outcome.moved_share)


def _answer(setting: Setting, planned: Sequence[Outcome]) -> str:
    most = max(outcome.time_saved for outcome in planned)
    best = _best(planned)
    if best is None:
        answer = f"Would it help? Hardly: no strategy saves more than {percent(most)} of the time."
        if setting.micro_batch == setting.window == 1:
            answer += (
                " With one sample per rank and micro-batch, only --window above 1, or packing, can "
                "help."
            )
        return answer
    return (
        f"Would it help? Yes: {best.strategy} saves {percent(best.time_saved)} of the step time "
        f"({1 / (1 - best.time_saved):.2f} times as fast) and moves {percent(best.moved_share)} of "
        f"the cost; nothing saves more than {percent(most)}. This holds as far as time follows the "
        "cost and the exchange is hidden behind compute."
    )
