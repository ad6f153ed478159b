"""What the example shows: a table of the runs, and a picture of the packs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.table import Table

from gpt.record import RunRecord

BAR = 0.8  # height of a pack's bar, of the space that it has
COLOURS = 20  # the palette's; neighbours differ


def results_table(runs: Sequence[RunRecord]) -> Table:
    """Set the runs side by side; the losses are compared with those of the first."""
    table = Table("", title="The same training, from the same seed")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("micro-batches per step", *(f"{run.microbatches_per_step:.1f}" for run in runs))
    row("fill", *(f"{run.fill:.0%}" for run in runs))
    row("largest load / mean load", *(f"{run.imbalance:.3f}" for run in runs))
    row("tokens per second", *(f"{run.tokens_per_second:,.0f}" for run in runs))
    row("loss of the last step", *(f"{run.losses[-1]:.6f}" for run in runs))
    row("largest difference of the losses", "-", *(f"{_gap(runs[0], run):.1e}" for run in runs[1:]))
    return table


def save_picture(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw the last step's packs: ranks down, tokens along, the colour changes by sequence."""
    mpl.use("Agg")
    figure, axes = plt.subplots(
        1, len(runs), figsize=(4.6 * len(runs), 4.8), sharex=True, layout="constrained"
    )
    for panel, run in zip(axes, runs, strict=True):
        _draw_packs(panel, run)
        panel.set_title(f"{run.name}\nlargest / mean load {run.imbalance:.2f}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_packs(panel: Axes, run: RunRecord) -> None:
    palette = mpl.colormaps["tab20"]
    rows = [(rank, pack) for rank, one in enumerate(run.steps[-1]) for pack in one.packs]
    number = 0
    for row, (_, pack) in enumerate(rows):
        start = 0
        for length in pack:
            corner = (start, row - BAR / 2)
            panel.add_patch(
                Rectangle(corner, length, BAR, facecolor=palette(number % COLOURS), lw=0)
            )
            start += length
            number += 1
    first_rows = [row for row in range(len(rows)) if row == 0 or rows[row][0] != rows[row - 1][0]]
    panel.set_yticks(first_rows, [f"rank {rows[row][0]}" for row in first_rows])
    for row in first_rows[1:]:
        panel.axhline(row - 0.5, color="0.3", lw=0.8)
    panel.set_xlim(0, run.capacity)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel("tokens of a micro-batch, up to the capacity")
    panel.spines[["top", "right"]].set_visible(False)


def _gap(one: RunRecord, other: RunRecord) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
