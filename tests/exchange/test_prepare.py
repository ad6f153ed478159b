"""The contract's exchange plan: all ranks' plans side by side."""

from typing import Any

import pytest
import torch

from evenstep.exchange import PreparedExchange, prepare_sample_exchange
from evenstep.serialize import deserialize_sample, sample_keys, tensor_metadata
from tests.exchange.samples import shown

FLATS = [[{"x": torch.full((1, 3), float(10 * rank + i))} for i in range(2)] for rank in range(2)]
ROUTE = [(0, 1, 1), (0, 0, 0), (1, 0, 0), (1, 1, 1)]
INDICES = [[0, 2], [1, 3]]


def _prepare(rank: int, **changed: Any) -> PreparedExchange:
    arguments: dict[str, Any] = {
        "local_flats": FLATS[rank],
        "local_global_indices": INDICES[rank],
        "route": ROUTE,
        "all_global_indices": INDICES,
        "all_tensor_meta": [[tensor_metadata(flat) for flat in flats] for flats in FLATS],
        "dp_rank": rank,
        "dp_size": 2,
        "window_size": 2,
        **changed,
    }
    return prepare_sample_exchange(**arguments)


def test_samples_line_up_between_ranks() -> None:
    plans = [_prepare(rank) for rank in range(2)]
    assert plans[0]["local_samples"] == [(1, 0, 1)]
    assert plans[1]["local_samples"] == [(1, 1, 1)]
    assert plans[0]["recv_schedule"] == {1: [(0, 0, 0)]}
    assert plans[1]["recv_schedule"] == {0: [(0, 1, 0)]}
    for rank, plan in enumerate(plans):
        other = plans[1 - rank]
        assert plan["send_splits"] == [
            other["recv_splits"][rank] if r != rank else 0 for r in (0, 1)
        ]
        assert plan["send_buf"].dtype == torch.uint8
        assert plan["send_buf"].numel() == sum(plan["send_splits"]) == 16
        meta = tensor_metadata(FLATS[rank][0])
        flat, end = deserialize_sample(plan["send_buf"], 0, meta, sample_keys(meta))
        assert shown(flat) == shown(FLATS[rank][0])
        assert end == 16
    with pytest.raises(KeyError, match="sendbuf"):
        plans[0]["sendbuf"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"window_size": 1}, r"route\[2\] has dst_slot 1; it must be in \[0, 1\)"),
        ({"route": [(-1, 0, 0), *ROUTE[1:]]}, r"route\[0\] has dst_slot -1"),
        ({"dp_rank": 2}, r"dp_rank is 2; it must be in \[0, 2\)"),
        ({"all_global_indices": [[0, 2]]}, "all_global_indices has 1 entries"),
        ({"all_tensor_meta": []}, "all_tensor_meta has 0 entries; it needs one per rank, 2"),
        ({"all_global_indices": [[0, 2], [1]]}, "rank 1 has 1 global indices and metadata of 2"),
        ({"local_global_indices": [0, 3]}, "local_global_indices differs from all_global_indices"),
        ({"local_flats": FLATS[0][:1]}, "1 local_flats for 2 global indices"),
        ({"route": ROUTE[:3]}, "rank 1 holds the global index 3, but route has 3 entries"),
        ({"route": [*ROUTE, (0, 0, 2)]}, "no rank holds the global index 4 of route"),
        ({"all_global_indices": [[0, 2], [1, 1]]}, "global index 1 is held twice, the second time"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _prepare(0, **changed)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RuntimeError, match="owner ranks 0 to 5 in a group of 2"):
        _prepare(0, route=[*ROUTE[:3], (1, 5, 1)])
