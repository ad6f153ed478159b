"""A run's statistics as one HTML page that needs nothing else: no script, no network."""

import html
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from string import Template
from typing import NamedTuple

from evenstep.reorder_buffer.charts import Band, Line, bar_chart, line_chart
from evenstep.reorder_buffer.stats import WindowStats

__all__ = ["write_report"]

_PHASES = ("collect", "cost", "control", "pack", "transfer", "merge")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; --ink: #1d2330; --faint: #6b7280; --line: #d9dde4;
    --paper: #ffffff; --before: #d9822b; --after: #2563ab; --third: #4d8f57; }
  @media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --faint: #9aa3b2;
    --line: #343b48; --paper: #14181f; --before: #f0a04b; --after: #6ea8e8; --third: #82c48c; } }
  body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper);
    color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
  h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
  p { margin: .2rem 0 .6rem; color: var(--faint); max-width: 46rem; }
  dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem;
    margin: 1.5rem 0; align-items: end; }
  dt { color: var(--faint); } dd { margin: 0; font-size: 1.5rem; font-weight: 600; }
  svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 12px; }
  table { border-collapse: collapse; } th, td { padding: .2rem 1rem .2rem 0; text-align: right; }
  th { color: var(--faint); font-weight: 400; border-bottom: 1px solid var(--line); }
  th:first-child, td:first-child { text-align: left; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
<dl>$figures</dl>
$sections
</body>
</html>
""")


class _Figure(NamedTuple):
    name: str
    value: str


def write_report(
    path: str | Path, stats: Sequence[WindowStats], *, title: str = "Balanced run"
) -> None:
    """Write a page about a run.

    Args:
        path: Where to write the HTML.
        stats: Windows in the order in which they were served, of one rank or of several (see
            `StatsFile` and `read_stats`). Loads are taken from the lowest rank among them.
        title: Its heading.

    Raises:
        ValueError: If there are no windows.
    """
    if not stats:
        raise ValueError("stats is empty; a report needs at least one window")
    first = min(window.dp_rank for window in stats)
    run = [window for window in stats if window.dp_rank == first]
    ranks = sorted({window.dp_rank for window in stats})
    page = _PAGE.substitute(
        title=html.escape(title),
        subtitle=html.escape(
            f"{len(run)} windows of {len(run[0].slots)} micro-batches on {run[0].dp_size} ranks; "
            f"times and bytes of {'rank' if len(ranks) == 1 else 'ranks'} "
            f"{', '.join(map(str, ranks))}."
        ),
        figures="".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in _figures(run)
        ),
        sections="\n".join([_loads(run), _moves(run), _times(run), _ranks(stats, ranks)]),
    )
    Path(path).write_text(page, encoding="utf-8")


def _figures(run: Sequence[WindowStats]) -> list[_Figure]:
    before = _mean([window.imbalance_before for window in run])
    after = _mean([window.imbalance_after for window in run])
    return [
        _Figure("largest / mean load as read", f"{before:.3f}"),
        _Figure("largest / mean load balanced", f"{after:.3f}"),
        _Figure("compute time saved, at best", f"{1 - after / before:.1%}"),
        _Figure("cost moved", f"{_mean([window.moved_cost_share for window in run]):.1%}"),
        _Figure("wait per window", _ms(_mean([window.seconds.wait for window in run]))),
    ]


def _loads(run: Sequence[WindowStats]) -> str:
    chart = line_chart(
        [
            Line("as read", "var(--before)", [window.imbalance_before for window in run]),
            Line("balanced", "var(--after)", [window.imbalance_after for window in run]),
        ],
        low=1.0,
    )
    return _section(
        "Largest load over mean load",
        "Per window. 1 is perfect: every rank finishes at the same time. The area between the "
        "lines is time that ranks no longer wait.",
        chart,
    )


def _moves(run: Sequence[WindowStats]) -> str:
    shares = [100 * window.moved_cost_share for window in run]
    sent = [(window.bytes_sent + window.bytes_received) / 1e6 for window in run]
    return _section(
        "What moved",
        "Share of the window's cost that changed its rank, in percent.",
        line_chart([Line("% of the cost", "var(--third)", shares)], low=0.0),
    ) + _section(
        "Traffic of this rank",
        "MB sent and received per window.",
        line_chart([Line("MB", "var(--third)", sent)], low=0.0),
    )


def _times(run: Sequence[WindowStats]) -> str:
    seconds = [_mean([getattr(window.seconds, phase) for window in run]) for phase in _PHASES]
    wait = _mean([window.seconds.wait for window in run])
    bands = [
        Band(phase, value * 1e3, "var(--after)")
        for phase, value in zip(_PHASES, seconds, strict=True)
    ]
    return _section(
        "Time per window",
        "Mean milliseconds of this rank. Under overlap only the wait delays the training loop; "
        "the rest happens beside it.",
        bar_chart([*bands, Band("wait in next()", wait * 1e3, "var(--before)")]),
    )


def _ranks(stats: Sequence[WindowStats], ranks: Sequence[int]) -> str:
    rows = []
    for rank in ranks:
        own = [window for window in stats if window.dp_rank == rank]
        cells = [
            f"{rank}",
            f"{fsum(window.bytes_sent for window in own) / 1e6:.1f}",
            f"{fsum(window.bytes_received for window in own) / 1e6:.1f}",
            *(_ms(_mean([getattr(w.seconds, phase) for w in own])) for phase in _PHASES),
            _ms(_mean([window.seconds.wait for window in own])),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ["rank", "MB sent", "MB received", *_PHASES, "wait"]
    table = (
        "<table><tr>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr>"
        + "".join(rows)
        + "</table>"
    )
    return _section("Ranks", "Bytes of the run, and mean times per window.", table)


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{content}</section>"


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
