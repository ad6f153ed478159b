"""Values and kinds that all ranks must have alike, whether or not their samples meet."""

from typing import Any

import pytest
import torch

from evenstep.reorder_buffer import BatchLayout, Global, ReorderingBuffer
from evenstep.reorder_buffer.common_values import check_common_values, note_of
from tests.harness import RankPools
from tests.reorder_buffer.numbered import over

LAYOUT = BatchLayout(fields={"size": Global()})


def _note(*slots: dict[str, Any]) -> bytes:
    return note_of(LAYOUT, slots)


def test_equal_values_pass_and_none_need_no_note() -> None:
    assert _note({"ids": torch.ones(1, 4)}) == b""
    first = _note({"tag": "a", "size": torch.tensor([4, 4])}, {"tag": "b", "names": ["x"]})
    second = _note({"size": torch.tensor([4, 4]), "tag": "a"}, {"names": ["y"], "tag": "b"})
    check_common_values([first, second], 2, across_slots=False)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"tag": "b", "size": [4]}, "tag"),
        ({"tag": "a", "size": [5]}, "size"),
        ({"tag": "a", "size": [4], "more": 1.5}, "more"),
        ({"size": [4]}, "tag"),
        ({"tag": ["a"], "size": [4]}, "tag"),
        ({"tag": True, "size": [4]}, "tag"),
    ],
)
def test_a_difference_names_field_slot_and_ranks(other: dict[str, Any], key: str) -> None:
    same = {"tag": "a", "size": [4]}
    notes = [_note(same, same), _note(same, same), _note(same, other)]
    told = f"field '{key}': rank 2 has another value than rank 0 in micro-batch 1 of the window"
    with pytest.raises(ValueError, match=told):
        check_common_values(notes, 2, across_slots=False)
    check_common_values(notes, 1, across_slots=False)  # the second is not served


def test_a_list_is_no_tuple() -> None:
    with pytest.raises(ValueError, match=r"field 'names': rank 1 .* \(tuple, list\)"):
        check_common_values(
            [_note({"names": ["x"]}), _note({"names": ("x",)})], 1, across_slots=False
        )


def test_samples_that_change_their_slot_need_one_value_in_all() -> None:
    note = _note({"tag": "a"}, {"tag": "b"})
    check_common_values([note, note], 2, across_slots=False)
    with pytest.raises(ValueError, match="in micro-batch 1 of the window, and in 0"):
        check_common_values([note, note], 2, across_slots=True)


def _cost(flat: Any) -> float:
    return float(flat["costs"])


def _serve(rank: int, _: int, changed: dict[str, Any], overlap: bool) -> tuple[int, str]:
    """Serve four windows, the last two of which are `changed` on rank 0; ranks 0 and 1 mix."""
    import torch.distributed as dist

    from evenstep.exchange import ModuleGroups

    def source() -> Any:
        for window in range(4):
            heavy = [[8.0, 9.0], [1.0, 2.0], [4.0, 5.0]][rank]
            batch = {"input_ids": torch.ones(2, 4), "costs": torch.tensor(heavy), "tag": "a"}
            yield {**batch, **changed} if window >= 2 and rank == 0 else batch

    main = dist.group.WORLD
    assert main is not None
    served = 0
    with (
        ModuleGroups.create(main, overlap=True) as groups,
        ReorderingBuffer[Any](source(), cost_of=_cost, overlap=overlap, **over(groups)) as batches,
    ):
        try:
            for _ in batches:
                served += 1
        except Exception as error:  # noqa: BLE001 - what it is, is the question
            return served, f"{type(error).__name__}: {error}"
    return served, ""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tag": "b"}, "field 'tag': rank 1 has another value than rank 0"),
        ({"input_ids": torch.ones(2, 4).double()}, "field 'input_ids': rank 1 has a torch.float32"),
        ({"more": torch.ones(2)}, "field 'more': samples of rank 1 lack it, and rank 0 has it"),
    ],
)
def test_all_ranks_raise_in_the_same_window(
    ranks: RankPools, changed: dict[str, Any], told: str, *, overlap: bool
) -> None:
    for served, error in ranks(3).run(_serve, changed, overlap):
        assert served == 2
        assert told in error
