"""Packs: zigzag slices, borders, padding."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.gbpacking import (
    Sample,
    build_unpacked_sample,
    make_packed_seq_params,
    pack_microbatch,
    padding_mask,
    slice_for_cp,
    zigzag_indices,
)
from evenstep.gbpacking.thd import cumulative_lengths

LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=6)
CP_SIZES = st.sampled_from([1, 2, 3, 4])


def samples_of(lengths: list[int], *, multiple: int = 1) -> list[Sample]:
    """Samples whose tokens tell sequence and position: 100 * sequence + position."""
    return [
        build_unpacked_sample(
            [100 * i + p for p in range(length)],
            [100 * i + p + 1 for p in range(length)],
            multiple=multiple,
            pad_token_id=-1,
        )
        for i, length in enumerate(lengths)
    ]


def pack_of(samples: list[Sample]) -> Sample:
    """Pack samples by the lengths that they carry."""
    return pack_microbatch(
        samples,
        original=[int(sample["original_seq_len"]) for sample in samples],
        padded=[int(sample["padded_seq_len"]) for sample in samples],
    )


def test_zigzag_takes_a_chunk_from_each_end_of_each_sequence() -> None:
    borders = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_indices(borders, cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices(borders, cp_size=2, cp_rank=1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(borders, cp_size=1, cp_rank=0).tolist() == list(range(12))


@given(lengths=LENGTHS, cp=CP_SIZES)
def test_zigzag_is_megatrons_slice_of_each_sequence(lengths: list[int], cp: int) -> None:
    """Compare with Megatron-Core's rule for one sequence: view as 2 x CP chunks, select two."""
    padded = [length * 2 * cp for length in lengths]
    borders = cumulative_lengths(padded)
    held = []
    for rank in range(cp):
        expected = []
        for start, length in zip(borders.tolist(), padded, strict=False):
            chunks = torch.arange(start, start + length).view(2 * cp, -1)
            expected.append(chunks[[rank, 2 * cp - 1 - rank]].flatten())
        index = zigzag_indices(borders, cp_size=cp, cp_rank=rank)
        if cp > 1:
            assert torch.equal(index, torch.cat(expected))
        held.append(index)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(padded)))


@pytest.mark.parametrize(
    ("borders", "size", "rank", "message"),
    [
        ([0, 4, 10], 2, 0, "sequence 1 of the pack has 6 tokens.*multiple of 4"),
        ([0, 4], 2, 2, "cp_rank is 2 of cp_size 2"),
        ([0, 4], 0, 0, "cp_size 0"),
    ],
)
def test_zigzag_refuses_what_it_cannot_cut(
    borders: list[int], size: int, rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        zigzag_indices(torch.tensor(borders), cp_size=size, cp_rank=rank)


def test_a_pack_lays_samples_end_to_end_with_both_borders() -> None:
    samples = samples_of([3, 4, 1], multiple=4)
    before = [{key: value.clone() for key, value in sample.items()} for sample in samples]
    packed = pack_of(samples)
    assert packed["tokens"].tolist() == [0, 1, 2, -1, 100, 101, 102, 103, 200, -1, -1, -1]
    assert packed["loss_mask"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert packed["position_ids"].tolist() == [0, 1, 2, 3] * 3
    assert packed["cu_seqlens"].tolist() == [0, 3, 7, 8]
    assert packed["cu_seqlens_padded"].tolist() == [0, 4, 8, 12]
    assert packed["cu_seqlens"].dtype == packed["cu_seqlens_padded"].dtype == torch.int32
    assert packed["max_seqlen"].tolist() == [4]
    assert all(
        torch.equal(value, sample[key])
        for old, sample in zip(before, samples, strict=True)
        for key, value in old.items()
    )


def test_a_pack_of_one_sample_does_not_share_its_memory() -> None:
    sample = samples_of([4])[0]
    pack_of([sample])["tokens"].zero_()
    assert sample["tokens"].tolist() == [0, 1, 2, 3]


@settings(max_examples=50)
@given(lengths=LENGTHS, cp=CP_SIZES)
def test_slices_of_all_ranks_hold_every_token_once(lengths: list[int], cp: int) -> None:
    packed = pack_of(samples_of(lengths, multiple=2 * cp if cp > 1 else 1))
    slices = [slice_for_cp(packed, cp_size=cp, cp_rank=rank) for rank in range(cp)]
    tokens = torch.cat([part["tokens"] for part in slices])
    assert torch.equal(tokens.sort().values, packed["tokens"].sort().values)
    for part in slices:
        assert len(part["tokens"]) == len(part["labels"]) == len(packed["tokens"]) // cp
        assert torch.equal(part["cu_seqlens"], packed["cu_seqlens"])
    masks = [
        padding_mask(
            packed["cu_seqlens"], packed["cu_seqlens_padded"], cp_size=cp, cp_rank=rank
        ).squeeze(0)
        for rank in range(cp)
    ]
    for part, mask in zip(slices, masks, strict=True):
        assert torch.equal(mask, part["tokens"] == -1)
        assert torch.equal(mask, part["loss_mask"] == 0)


def test_a_pack_beyond_int32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483648 tokens.*int32"):
        cumulative_lengths([2**30, 2**30])


def test_packed_seq_params_are_the_installed_releases_own() -> None:
    module = pytest.importorskip("megatron.core.packed_seq_params")
    packed = pack_of(samples_of([3, 4], multiple=4))
    params = make_packed_seq_params(packed["cu_seqlens"], packed["cu_seqlens_padded"], 4)
    assert type(params) is module.PackedSeqParams
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 7]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 4, 8]
    assert params.max_seqlen_q == params.max_seqlen_kv == 4
    assert params.cp_group is None
    if hasattr(params, "pad_between_seqs"):  # 0.19
        assert params.pad_between_seqs is True
        assert params.total_tokens == 8
        assert params.seq_idx.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


def test_fields_that_a_release_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    module = ModuleType("megatron.core.packed_seq_params")
    module.__dict__["PackedSeqParams"] = dataclasses.make_dataclass(
        "PackedSeqParams", ["qkv_format", "cu_seqlens_q", "max_seqlen_q"]
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    params = make_packed_seq_params(borders, borders, 4)
    assert (params.qkv_format, params.max_seqlen_q) == ("thd", 4)
    assert params.cu_seqlens_q is borders
