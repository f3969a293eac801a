"""Pictures of a traces artifact: PNG or nothing, and the outline of the histogram."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.traces import plots
from slipstream.traces.summary import bucket

PNG = b"\x89PNG\r\n\x1a\n"


def test_no_lengths_no_picture() -> None:
    assert plots.lengths({}) is None
    assert plots.lengths({"prompt_lengths": {}, "output_lengths": {}}) is None


@pytest.mark.parametrize("bins", [{"0": 1}, {"1": 1}, {"7": 3}, {"12": 4, "96": 1}, {"16": 900, "98304": 300}])
def test_lengths(bins: dict[str, int]) -> None:
    for figures in ({"output_lengths": bins}, {"prompt_lengths": {"5": 2}, "output_lengths": bins}):
        picture = plots.lengths(figures)
        assert picture is not None
        assert picture.startswith(PNG)


@pytest.mark.parametrize("repeat", [1, 10, 100])
def test_every_row_is_in_the_area_under_the_outline(repeat: int) -> None:
    bins: dict[int, int] = {}
    for length in (1, 15, 16, 17, 31, 100, 127, 128, 5000, 70_000):
        bins[bucket(length)] = bins.get(bucket(length), 0) + repeat
    edges, heights = plots.outline(bins)
    assert edges == sorted(set(edges))
    assert len(edges) == len(heights) + 1
    area = sum(h * math.log2(b / a) for h, a, b in zip(heights, edges, edges[1:], strict=False))
    assert area == pytest.approx(10 * repeat)


def test_the_more_rows_the_narrower_the_bins() -> None:
    assert plots.outline({128: 1, 144: 1, 160: 1, 176: 1})[0] == [128, 192]
    assert plots.outline({128: 100})[0] == [128, 160]
    assert plots.outline({128: 1000})[0] == [128, 144]


@pytest.mark.parametrize(
    "execution",
    [None, {}, {"throughput": {}}, {"throughput": {"bucket_s": 1.0, "tokens_per_s": []}}]
    + [{"throughput": {"bucket_s": 1.0, "tokens_per_s": speeds}} for speeds in ([0.0], [None, math.nan])],
)
def test_no_throughput_no_picture(execution: dict[str, Any] | None) -> None:
    assert plots.throughput(execution) is None


@pytest.mark.parametrize("speeds", [[5.0], [0.0, None, 3.0], [1.0] * 239])
@pytest.mark.parametrize("bucket_s", [1.0, 16.0, 512.0])
def test_throughput(speeds: list[float], bucket_s: float) -> None:
    throughput = {"bucket_s": bucket_s, "tokens_per_s": speeds}
    for totals in ({}, {"output_tokens": 100, "seconds": 0.0}, {"output_tokens": 100, "seconds": 10.0}):
        picture = plots.throughput({**totals, "throughput": throughput})
        assert picture is not None
        assert picture.startswith(PNG)
