"""The picture of `--plot`: the loads of all ranks, before and after."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.balance.cli.errors import MissingPackageError, UsageError
from evenstep.balance.cli.figures import Loads, rank_totals, ratio
from evenstep.balance.synchronize import Synchronize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Grey before, one hue after, and pale above a rank's load for the time that it waits.
_BEFORE, _AFTER, _WAITING = "#8a8f98", "#2a7fb8", "#e4e7eb"
_FORMATS = (".png", ".svg", ".pdf")
_MAX_SEPARATE_BARS = 128
_MAX_COLUMNS = 4


def check_plot_path(path: Path) -> None:
    """Raise before any work is done if the plot could not be written.

    Raises:
        MissingPackageError: matplotlib is not installed.
        UsageError: The suffix names no format, or the folder is missing.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "cli")
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot {path} must end in one of {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path} is in a folder that does not exist")


def plot_loads(
    path: Path, loads: Mapping[str, Loads], *, title: str, synchronize: Synchronize
) -> None:
    """Draw one panel per strategy: the load of every rank, relative to the mean.

    Where every micro-batch synchronises, a panel shows the micro-batch of median imbalance.

    Args:
        path: File to write; its suffix decides the format (png, svg, pdf).
        loads: By strategy, the one before balancing first; all with the same number of ranks.
        title: What was simulated.
        synchronize: When ranks wait for each other.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415 (likewise)
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 (likewise)

    panels = {name: _relative(_waited_for(each, synchronize)) for name, each in loads.items()}
    rows = -(-len(panels) // _MAX_COLUMNS)
    columns = -(-len(panels) // rows)
    figure = Figure(figsize=(3.2 * columns, 1.0 + 2.6 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, (axis, (name, ranks)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        _draw_panel(axis, name, ranks, _AFTER if index else _BEFORE)
    for unused in range(len(panels), axes.size):
        axes.flat[unused].set_visible(False)
        axes.flat[unused - columns].tick_params(labelbottom=True)  # now the last of its column
    axes.flat[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # for all: they share it
    axes.flat[0].set_ylim(0, 1.08 * max(map(max, panels.values())))
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("rank", fontsize=9)
    unit = "micro-batch" if synchronize == "microbatch" else "step"
    figure.supylabel(f"load of a {unit} / mean", fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path} cannot be written: {error}") from error


def _draw_panel(axis: "Axes", name: str, ranks: Sequence[float], color: str) -> None:
    largest = max(ranks)
    places = range(len(ranks))
    width = 0.85 if len(ranks) <= _MAX_SEPARATE_BARS else 1.0
    axis.bar(places, [largest] * len(ranks), width=width, color=_WAITING, label="waiting")
    axis.bar(places, ranks, width=width, color=color, label="computing")
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_title(f"{name}: largest {largest:.2f} x mean", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _waited_for(loads: Loads, synchronize: Synchronize) -> Sequence[float]:
    """Return the loads of all ranks where they wait once."""
    if synchronize == "step":
        return rank_totals(loads)
    ascending = sorted(loads, key=lambda ranks: ratio(max(ranks), fsum(ranks)))
    return ascending[len(ascending) // 2]


def _relative(ranks: Sequence[float]) -> list[float]:
    mean = fsum(ranks) / len(ranks)
    return [ratio(load, mean) for load in ranks]
