"""`evenstep-balance simulate`: what each strategy would save, on the user's own numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Annotated

import typer

from evenstep.balance.cli import options
from evenstep.balance.cli.draws import CostsOf, Draws, choose_draws
from evenstep.balance.cli.errors import UsageError
from evenstep.balance.cli.figures import ratio
from evenstep.balance.cli.plot import check_plot_path
from evenstep.balance.cli.reading import COST, LENGTH
from evenstep.balance.cli.simulate_report import plot_step, print_json, print_outcomes
from evenstep.balance.cli.simulation import Contender, Setting, Step, simulate_step, summarize
from evenstep.balance.cli.source import Format, Source
from evenstep.balance.cli.strategies import ACROSS_SLOTS, AS_READ, WITHIN_SLOT, contender
from evenstep.balance.cli.terminal import step_progress
from evenstep.balance.packing_load import SequenceLoad

STRATEGIES = (*WITHIN_SLOT, *ACROSS_SLOTS)


def simulate(
    input_path: options.Input = Path("-"),
    *,
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of a rank in a micro-batch.")],
    window: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a step, planned together.")
    ] = 1,
    synchronize: options.Synchronization = "microbatch",
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Compare only this; may be repeated. One of {', '.join(STRATEGIES)}; the last "
            "two need --window above 1."
        ),
    ] = None,
    draws: options.Draws = 200,
    seed: options.Seed = None,
    hidden_size: options.HiddenSize = None,
    bidirectional: options.Bidirectional = False,
    format: options.FormatOption = Format.AUTO,  # noqa: A002 (the option's name)
    column: options.Column = None,
    key: options.Key = None,
    skip_bad: options.SkipBad = False,
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Simulate training steps on the numbers of INPUT, with and without balancing.

    INPUT holds one number per sample: its cost, or its length with --hidden-size. A step takes
    dp-size x micro-batch x window samples, rank by rank, in the order of the input unless there is
    a --seed; samples at the end that fill no step are not used. The time of a step is what its
    slowest ranks take; the exchange itself is not counted.
    """
    source = Source(path=input_path, format=format, column=column, key=key)
    setting = Setting(
        dp_size=dp_size, micro_batch=micro_batch, window=window, synchronize=synchronize
    )
    with options.one_line_errors(source):
        if plot:
            check_plot_path(plot)
        contenders = _contenders(strategy, setting)
        costs_of = costs_from(options.sequence_load(hidden_size, bidirectional=bidirectional))
        rule = COST if hidden_size is None else LENGTH
        numbers = options.load_numbers(source, rule, skip_bad=skip_bad)
        chosen = choose_draws(
            numbers.values,
            setting.samples_per_step,
            max_draws=draws,
            seed=seed,
            what=setting.describe(),
        )
        steps = _simulate(setting, contenders, chosen, costs_of)
        if plot:
            example = _typical(chosen, steps[AS_READ])
            plot_step(plot, setting, contenders, setting.slots(costs_of(example)))
    outcomes = [summarize(name, done, steps[AS_READ]) for name, done in steps.items()]
    if as_json:
        about = options.about(source, numbers, hidden_size=hidden_size, plot=plot)
        print_json(about, setting, chosen, outcomes)
    else:
        print_outcomes(setting, chosen, outcomes, plot)


def costs_from(load: SequenceLoad | None) -> CostsOf:
    """Return what turns numbers into costs: the load of sequences, or nothing if there is none."""
    if load is None:
        return list
    linear, quadratic, scale = load.integers()
    return lambda lengths: [
        (linear + quadratic * length) * length / scale for length in map(int, lengths)
    ]


def _contenders(names: Sequence[str] | None, setting: Setting) -> dict[str, Contender]:
    for name in names or ():
        if name not in STRATEGIES:
            raise UsageError(f"--strategy {name} must be one of {', '.join(STRATEGIES)}")
        if name in ACROSS_SLOTS and setting.window == 1:
            raise UsageError(
                f"--strategy {name} exchanges samples between micro-batches; it needs --window "
                "above 1"
            )
    offered = STRATEGIES if setting.window > 1 else WITHIN_SLOT
    return {name: contender(name, setting) for name in (AS_READ, *(names or offered))}


def _simulate(
    setting: Setting, contenders: Mapping[str, Contender], draws: Draws, costs_of: CostsOf
) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {name: [] for name in contenders}
    for numbers in step_progress(draws, len(draws), "simulating"):
        slots = setting.slots(costs_of(numbers))
        for name, each in contenders.items():
            steps[name].append(simulate_step(setting, slots, each))
    return steps


def _typical(draws: Draws, as_read: Sequence[Step]) -> Sequence[float]:
    """Return the numbers of the step whose imbalance, as read, is the median."""
    imbalance = [ratio(step.time, step.ideal) for step in as_read]
    return draws[imbalance.index(median_low(imbalance))]
