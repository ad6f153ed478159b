"""`evenstep-balance pack`: what packing would save, on the user's own lengths."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from evenstep.balance.cli import options
from evenstep.balance.cli.draws import Draws, choose_draws
from evenstep.balance.cli.errors import InputError
from evenstep.balance.cli.pack_report import (
    PackedStep,
    Packing,
    plot_packings,
    print_json,
    print_packings,
)
from evenstep.balance.cli.plot import check_plot_path
from evenstep.balance.cli.reading import packable
from evenstep.balance.cli.source import Format, Source
from evenstep.balance.cli.terminal import step_progress
from evenstep.balance.packing import PackingStrategy, plan_packing
from evenstep.balance.packing_plan import PackingPlan

Pack: TypeAlias = Callable[[Sequence[int], PackingStrategy], PackingPlan]

_DEFAULT_GLOBAL_BATCH = 512

# What is there today first: the others are compared with it.
_STRATEGIES: tuple[PackingStrategy, ...] = ("arrival", "balanced")


def pack(
    input_path: options.Input = Path("-"),
    *,
    capacity: Annotated[
        int, typer.Option(min=1, help="Most tokens of a bin: tokens per rank x CP size.")
    ],
    dp_size: Annotated[
        int, typer.Option(min=1, help="Data-parallel ranks: bins of a micro-batch.")
    ] = 1,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences of a step, packed together.",
            show_default=f"{_DEFAULT_GLOBAL_BATCH}, or the whole input if it is shorter",
        ),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Most sequences of a bin.", show_default="no limit")
    ] = None,
    microbatch_multiple: Annotated[
        int,
        typer.Option(
            min=1, help="The micro-batches of a step are a multiple of this (pipeline schedules)."
        ),
    ] = 1,
    synchronize: options.Synchronization = "microbatch",
    draws: options.Draws = 20,
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
    """Pack the sequences of INPUT into bins, in arrival order and balanced.

    INPUT holds one length in tokens per sequence, an integer of at least 1 and at most the
    capacity. A step takes a global batch of them in the order of the input, unless there is a
    --seed; sequences at the end that fill no step are not used. The load of a bin is its tokens,
    or with --hidden-size the sum of L + L*L / (12 H) over its sequences.
    """
    source = Source(path=input_path, format=format, column=column, key=key)
    with options.one_line_errors(source):
        if plot:
            check_plot_path(plot)
        load = options.sequence_load(hidden_size, bidirectional=bidirectional)
        numbers = options.load_numbers(source, packable(capacity), skip_bad=skip_bad)
        size = global_batch or min(_DEFAULT_GLOBAL_BATCH, len(numbers.values))
        chosen = choose_draws(
            numbers.values, size, max_draws=draws, seed=seed, what="its global batch"
        )

        def pack_step(lengths: Sequence[int], strategy: PackingStrategy) -> PackingPlan:
            return plan_packing(
                lengths,
                capacity=capacity,
                num_ranks=dp_size,
                load=load,
                microbatch_multiple=microbatch_multiple,
                max_sequences=max_sequences,
                synchronize=synchronize,
                strategy=strategy,
            )

        packings = _pack_all(chosen, pack_step)
        if plot:
            plot_packings(plot, packings, synchronize)
    if as_json:
        about = options.about(source, numbers, hidden_size=hidden_size, plot=plot)
        print_json(about, chosen, packings)
    else:
        print_packings(chosen, packings, plot)


def _pack_all(draws: Draws, pack_step: Pack) -> list[Packing]:
    """Pack every step with every strategy.

    Raises:
        InputError: A step cannot be packed as asked.
    """
    steps: dict[PackingStrategy, list[PackedStep]] = {name: [] for name in _STRATEGIES}
    for number, values in enumerate(step_progress(draws, len(draws), "packing")):
        lengths = list(map(int, values))
        for name in _STRATEGIES:
            start = time.perf_counter()
            try:
                plan = pack_step(lengths, name)
            except ValueError as error:
                raise InputError(f"step {number} cannot be packed: {error}") from error
            steps[name].append(PackedStep(plan, time.perf_counter() - start))
    return [Packing.of(name, done, steps["arrival"]) for name, done in steps.items()]
