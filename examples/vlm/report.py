"""What the run shows: a progress bar, a table, and a picture of the loads."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from vlm.record import RunRecord

STEPS_PER_LINE = 10  # where the output is no terminal, one line now and then


def count_steps(name: str, num_steps: int, console: Console) -> Iterator[int]:
    """Yield 0, 1, ... and show how far the run is; a quiet console shows nothing."""
    if console.is_terminal:
        yield from track(range(num_steps), description=f"{name:14}", console=console)
        return
    for step in range(num_steps):
        yield step
        done = step + 1
        if done % STEPS_PER_LINE == 0 or done == num_steps:
            console.print(f"{name}: step {done} of {num_steps}")


def results_table(plain: RunRecord, balanced: RunRecord, exchange_s: float) -> Table:
    """Set the two runs side by side; an exchange took `exchange_s` seconds per step."""
    table = Table("", title="The same training, from the same seed")
    for heading in ("as it comes", "balanced"):
        table.add_column(heading, justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    runs = (plain, balanced)
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        row(f"step time {name}", *(_ms(run.step_s.quantile(share).item()) for run in runs))
    row("largest load / mean load", *(f"{run.imbalance:.3f}" for run in runs))
    row("samples moved", *(f"{run.moved_share:.0%}" for run in runs))
    row("time in the exchange, per step", "-", _ms(exchange_s))
    row("time waiting in next(), per step", *(_ms(run.wait_s) for run in runs))
    row("loss of the last step", *(f"{run.losses[-1].item():.6f}" for run in runs))
    row("largest difference of the losses", "-", f"{largest_difference(plain, balanced):.1e}")
    row("speed-up that the loads allow", "-", f"{plain.imbalance / balanced.imbalance:.2f}")
    row("speed-up", "-", f"{speed_up(plain, balanced):.2f}")
    return table


def speed_up(plain: RunRecord, balanced: RunRecord) -> float:
    """Seconds of all steps as the data comes, over those of all balanced steps."""
    return (plain.step_s.sum() / balanced.step_s.sum()).item()


def largest_difference(plain: RunRecord, balanced: RunRecord) -> float:
    """Largest difference between the two loss curves at the same step."""
    return (plain.losses - balanced.losses).abs().amax().item()


def save_picture(plain: RunRecord, balanced: RunRecord, path: Path) -> None:
    """Draw each rank's load at each step, both runs side by side, as a PNG."""
    mpl.use("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    titles = ("As the data comes", "Balanced")
    for panel, title, run in zip(axes, titles, (plain, balanced), strict=True):
        _draw_loads(panel, run.loads)
        panel.set_title(f"{title}: largest / mean load {run.imbalance:.2f}")
    axes[0].set_ylabel("load of a rank, GFLOP")
    axes[0].set_ylim(bottom=0)
    axes[1].legend(loc="upper right", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_loads(panel: Axes, loads: Tensor) -> None:
    num_steps, num_ranks = loads.shape
    steps = range(1, num_steps + 1)
    panel.fill_between(
        steps,
        loads.mean(dim=1).tolist(),
        loads.amax(dim=1).tolist(),
        step="mid",
        color="0.88",
        label="the others wait",
    )
    colours = mpl.colormaps["viridis"]
    for rank in range(num_ranks):
        colour = colours(0.15 + 0.6 * rank / max(1, num_ranks - 1))
        name = f"rank {rank}" if num_ranks <= 4 else None
        panel.step(steps, loads[:, rank].tolist(), where="mid", color=colour, label=name, lw=1.4)
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.spines[["top", "right"]].set_visible(False)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
