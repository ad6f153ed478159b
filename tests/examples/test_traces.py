import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm.traces import (
    CONVERSATION_TOKENS,
    MAX_MERGED_TOKENS,
    RECEIPT_HEIGHT_PER_WIDTH,
    RECEIPT_PATCHES,
    ImageSize,
    TraceError,
    image_grid,
    quantile,
    read_image_sizes,
    receipt_size,
)

RECEIPTS = Path(__file__).parents[2] / "../shared/traces/sroie_receipts_wh.csv"
SHARES = [(step + 0.5) / 1000 for step in range(1000)]


@pytest.mark.parametrize("table", [RECEIPT_PATCHES, RECEIPT_HEIGHT_PER_WIDTH, CONVERSATION_TOKENS])
def test_tables_hold_twenty_one_increasing_quantiles(table: tuple[float, ...]) -> None:
    assert len(table) == 21
    assert list(table) == sorted(table)
    for place, value in enumerate(table):
        assert quantile(table, place / 20) == pytest.approx(value, rel=1e-12)


def test_quantiles_are_linear_between_the_table() -> None:
    assert quantile((10.0, 20.0, 60.0), 0.25) == 15.0
    assert quantile((10.0, 20.0, 60.0), 0.75) == 40.0
    assert quantile((10.0, 20.0, 60.0), 1.0) == 60.0


def test_the_tables_have_the_shape_of_the_traces() -> None:
    patches = [quantile(RECEIPT_PATCHES, share) for share in SHARES]
    assert sum(patches) / len(patches) == pytest.approx(14479, rel=0.05)  # the trace's mean
    assert quantile(CONVERSATION_TOKENS, 0.5) == 1412
    assert quantile(CONVERSATION_TOKENS, 0.9) == 2820


@pytest.mark.parametrize(
    ("size", "scale", "grid"),
    [
        (ImageSize(463, 1013), 1, (72, 34)),  # 17 x 36 squares of 28 pixels
        (ImageSize(28, 28), 1, (2, 2)),
        (ImageSize(5, 300), 1, (22, 2)),  # a side is at least 28 pixels
        (ImageSize(463, 1013), 64, (10, 4)),  # 57.9 x 126.6 pixels: 2 x 5 squares
        (ImageSize(4961, 7016), 1, (304, 214)),  # shrunk to at most 16384 tokens
    ],
)
def test_image_grid_follows_the_patch_rule(
    size: ImageSize, scale: int, grid: tuple[int, int]
) -> None:
    assert image_grid(size, scale=scale) == grid


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([1, 4, 64, 1000, 100_000]))
def test_image_grid_is_even_and_keeps_the_limit(width: int, height: int, scale: int) -> None:
    rows, columns = image_grid(ImageSize(width, height), scale=scale)
    assert rows >= 2
    assert columns >= 2
    assert rows % 2 == columns % 2 == 0
    longer_side_alone = min(rows, columns) == 2  # an extreme shape cannot shrink below one square
    assert rows * columns // 4 <= max(1, MAX_MERGED_TOKENS / scale) or longer_side_alone


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.84])
def test_receipts_have_the_patches_of_their_quantile(share: float) -> None:
    rows, columns = image_grid(receipt_size(share, 0.5), scale=1)
    assert rows * columns == pytest.approx(quantile(RECEIPT_PATCHES, share), rel=0.06)


def test_scale_divides_the_patches() -> None:
    def mean(scale: int) -> float:
        grids = [image_grid(receipt_size(share, share), scale=scale) for share in SHARES]
        return sum(math.prod(grid) for grid in grids) / len(grids)

    assert mean(1) / mean(64) == pytest.approx(64, rel=0.05)


@pytest.mark.skipif(not RECEIPTS.exists(), reason="the traces are not beside this checkout")
def test_the_receipts_trace_gives_the_built_in_table() -> None:
    sizes = read_image_sizes(RECEIPTS)
    patches = sorted(math.prod(image_grid(size, scale=1)) for size in sizes)
    assert len(patches) == 626
    assert (patches[0], patches[-1]) == (1496, 65232)
    assert round(sum(patches) / len(patches)) == 14479
    for place, value in enumerate(RECEIPT_PATCHES):
        assert quantile(tuple(patches), place / 20) == pytest.approx(value, rel=1e-3)


def test_read_image_sizes(tmp_path: Path) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_text("463,1013\n 992, 1403\n")
    assert read_image_sizes(trace) == ((463, 1013), (992, 1403))
    trace.write_text("width,height\n463,1013\n")
    assert read_image_sizes(trace) == ((463, 1013),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no images: add rows"),
        ("height;width\n", "line 1: 'height;width' is not a row"),
        ("width,height\n", "has no images"),
        ("width,height\n463,1013\n12\n", "line 3: '12' is not a row of two positive"),
        ("width,height\n463,x\n", "line 2: '463,x' is not a row"),
        ("width,height\n463,-1\n", "line 2: '463,-1' is not a row"),
        ("width,height\n1,2,3\n", "line 2: '1,2,3' is not a row"),
        ("width,height\n463,1013\n\n5,5\n", "line 3: '' is not a row"),
    ],
)
def test_unreadable_rows_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_image_sizes(trace)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*none\.csv: No such file"):
        read_image_sizes(tmp_path / "none.csv")


def test_a_binary_trace_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "sizes.csv"
    trace.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8 text"):
        read_image_sizes(trace)
