"""The report: one file that needs nothing else, with the run's figures in it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evenstep.reorder_buffer import write_report
from evenstep.reorder_buffer.charts import Line, line_chart
from tests.reorder_buffer.test_stats import window

VOID = {"meta", "line", "rect", "circle", "polyline"}


class Balanced(HTMLParser):
    """Collects text, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.polylines: list[str] = []

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "polyline":
            self.polylines.append(dict(attrs)["points"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> Balanced:
    page = Balanced()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_the_page_has_the_figures_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runs = [window(number, dp_rank=rank) for rank in (0, 1) for number in range(5)]
    write_report(path, runs, title="Receipts <8 ranks>")
    text = " ".join(read(path).text)
    for shown in ("Receipts <8 ranks>", "5 windows of 2 micro-batches on 2 ranks", "ranks 0, 1"):
        assert shown in text
    for figure in ("1.500", "1.050", "30.0%", "25.0%", "125.0 ms"):
        assert figure in text
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link", source)


def test_one_window_makes_a_page_too_and_none_does_not(tmp_path: Path) -> None:
    write_report(tmp_path / "one.html", [window(0)])
    assert "1 windows" in " ".join(read(tmp_path / "one.html").text)
    with pytest.raises(ValueError, match="stats is empty; a report needs at least one window"):
        write_report(tmp_path / "none.html", [])


def test_long_runs_are_thinned_to_their_largest_values() -> None:
    page = Balanced()
    page.feed(line_chart([Line("load", "red", [1.0] * 9_999 + [3.0])], low=1.0))
    (points,) = page.polylines
    assert len(points.split()) == 400
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[-1] < heights[0]  # upwards is smaller
