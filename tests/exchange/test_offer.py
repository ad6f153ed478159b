"""Offers, their bytes, and what is made of damaged ones."""

import contextlib
import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.exchange import MismatchError, Offer, ProtocolError
from evenstep.exchange.offer_wire import SchemaAnnouncer, SchemaTable
from evenstep.exchange.schemas import check_same_schema
from evenstep.serialize import (
    FieldSpec,
    FlatSample,
    SampleSchema,
    TensorSample,
    fold_values,
    sample_layout,
)
from tests.exchange.samples import agreed, offer_of


def _message(offer: Offer, announcer: SchemaAnnouncer | None = None) -> bytes:
    layouts = [sample_layout(fold_values(flat)) for flat in offer.samples]
    return (announcer or SchemaAnnouncer()).encode(offer, layouts)


def test_the_bytes_are_as_documented() -> None:
    samples: list[FlatSample] = [
        {"x": torch.zeros(300, dtype=torch.float32)},
        {"x": torch.zeros(2)},
    ]
    offer = Offer(samples=samples, slot_counts=[1, 1], costs=[1.5, 2.0], exhausted=True, note=b"hi")
    schema = SampleSchema((FieldSpec("x", torch.float32, 1),)).encode()
    assert _message(offer) == (
        struct.pack("<BBHIIIII", 1, 1, 0, 2, 2, 1, 0, 2)
        + b"hi"
        + struct.pack("<2I", 1, 1)
        + struct.pack("<2d", 1.5, 2.0)
        + struct.pack("<2q", 1200, 8)
        + struct.pack("<2H", 0, 0)
        + struct.pack("<2H", 2, 1)
        + struct.pack("<I", len(schema))
        + schema
        + b"\xac\x02\x02"
    )


def test_what_was_offered_is_reported() -> None:
    offers = [offer_of(0, [2, 3]), offer_of(1, [4, 0, 1], exhausted=True), offer_of(2, [])]
    agreement = agreed(offers)[0]
    assert agreement.num_slots == 3
    assert [report.slot_counts for report in agreement.reports] == [(2, 3), (4, 0, 1), ()]
    assert [report.exhausted for report in agreement.reports] == [False, True, False]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3), (0, 4), (1, 4)]
    assert agreement.holders.tolist() == [list(place) for place in places]
    costs = [offers[rank].costs[local] for rank, local in places]
    slots = [agreement.costs_of_slot(slot) for slot in range(3)]
    assert [cost for slot in slots for cost in slot] == costs
    for index, (rank, local) in enumerate(places):
        layout = agreement.reports[rank].layout(local)
        assert layout == sample_layout(fold_values(offers[rank].samples[local]))
        assert layout.nbytes == agreement.nbytes[index]


def test_later_slots_can_be_left_out() -> None:
    agreement = agreed([offer_of(0, [2, 3]), offer_of(1, [1])])[0].first_slots(1)
    assert agreement.holders.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert agreement.num_slots == 1


def test_a_sample_may_have_several_costs() -> None:
    offer = Offer(samples=[{}, {}], slot_counts=[2], costs=[(1.0, 2.0), (3.0, 4.0)])
    agreement = agreed([offer, offer])[1]
    assert agreement.cost_rows_of_slot(0) == [(1.0, 2.0), (3.0, 4.0)] * 2
    assert agreement.costs_of_slot(0) == [1.0, 3.0, 1.0, 3.0]


def test_a_schema_is_announced_once_and_again_until_peers_know_it() -> None:
    announcer, table = SchemaAnnouncer(), SchemaTable()
    first = _message(offer_of(0, [3]), announcer)
    assert _message(offer_of(0, [3]), announcer) == first  # the round failed: nobody knows it
    announcer.mark_announced()
    second = _message(offer_of(0, [3]), announcer)
    assert len(second) < len(first)
    table.decode(memoryview(first), 0)
    report = table.decode(memoryview(second), 0)
    assert len(report.schemas) == 1
    assert report.note == b""
    assert report.layout(2) == sample_layout(fold_values(offer_of(0, [3]).samples[2]))


def test_metadata_takes_at_most_64_bytes_per_sample() -> None:
    text = torch.zeros(1, 2048, dtype=torch.int64)
    flat: TensorSample = {
        "input_ids": text,
        "labels": text,
        "loss_mask": text.float(),
        "attention_mask": text.bool(),
        "position_ids": torch.zeros(3, 1, 2048, dtype=torch.int64),
        "vision.hidden_states": torch.empty(65232, 1176, device="meta"),
        "vision.grid_thw": torch.zeros(3, 3, dtype=torch.int64),
    }
    announcer = SchemaAnnouncer()
    offer = Offer(samples=[{}] * 32, slot_counts=[32], costs=[1.0] * 32)
    layouts = [sample_layout(flat)] * 32
    announcer.encode(offer, layouts)
    announcer.mark_announced()
    assert len(announcer.encode(offer, layouts)) + 8 + 28 <= 64 * 32  # with frame and header


def test_a_note_arrives() -> None:
    assert SchemaTable().decode(memoryview(GOOD), 1).note == b"note"


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (math.nan, "cost of sample 1 is nan; a cost must be a finite number >= 0"),
        (math.inf, "cost of sample 1 is inf"),
        (-1.0, "cost of sample 1 is -1.0"),
        (torch.ones(2), "cost of sample 1 is no number"),
        ("heavy", "cost of sample 1 is no number: 'heavy'"),
        (None, "cost of sample 1 is no number: None"),
        ((1.0, 2.0), r"samples have \[1, 2\] costs; give each the same number"),
        ((), r"samples have \[0, 1\] costs"),
    ],
)
def test_a_bad_cost_is_refused(cost: object, told: str) -> None:
    offer = Offer(samples=[{}] * 3, slot_counts=[3], costs=[1.0, cost, 1.0])  # type: ignore[list-item] # on purpose
    with pytest.raises(ValueError, match=told):
        _message(offer)


def test_counts_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slot_counts is \[1, 2\]; it must hold .* 2 together"):
        Offer(samples=[{}, {}], slot_counts=[1, 2], costs=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"slot_counts is \[3, -1\]"):
        Offer(samples=[{}, {}], slot_counts=[3, -1], costs=[1.0, 1.0])
    with pytest.raises(ValueError, match="1 costs given for 2 samples"):
        Offer(samples=[{}, {}], slot_counts=[2], costs=[1.0])


GOOD = _message(replace(offer_of(1, [2, 3]), note=b"note"))


def _read_all(message: bytes) -> None:
    report = SchemaTable().decode(memoryview(message), 7)
    for local in range(sum(report.slot_counts)):
        report.layout(local)


@given(length=st.integers(0, len(GOOD) - 1))
@settings(max_examples=200, deadline=None)
def test_a_truncated_message_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="rank 7"):
        _read_all(GOOD[:length])


@given(bit=st.integers(0, 8 * len(GOOD) - 1))
@settings(max_examples=400, deadline=None)
def test_a_flipped_bit_is_refused_or_harmless(bit: int) -> None:
    damaged = bytearray(GOOD)
    damaged[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(ProtocolError):
        _read_all(bytes(damaged))


@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_hostile_bytes_are_refused_or_harmless(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        _read_all(data)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ((0, 1, 0, 0, 0, 0, 0, 1 << 31), "offer of rank 7 ends .* bytes early"),
        ((0, 1, 0, 0, 1 << 31, 0, 0, 0), "offer of rank 7 ends .* bytes early"),
        ((0, 1, 0, 1 << 31, 0, 0, 0, 0), "offer of rank 7 ends .* bytes early"),
        ((0, 1, 0, 0, 0, 1 << 31, 0, 0), "offer of rank 7 ends 4 bytes early"),
        ((0, 1, 0, 0, 0, 0, 5, 0), "rank 7 counts 5 schemas and 0 samples where this rank has 0"),
        ((0, 0, 0, 0, 0, 0, 0, 0), "rank 7 offers samples without a cost"),
    ],
)
def test_declared_counts_are_not_believed(head: tuple[int, ...], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        _read_all(struct.pack("<BBHIIIII", *head))


def test_a_schema_never_announced_is_refused() -> None:
    announcer = SchemaAnnouncer()
    _message(offer_of(0, [1]), announcer)
    announcer.mark_announced()
    message = bytearray(_message(offer_of(0, [1]), announcer))
    message[16:20] = struct.pack("<I", 0)
    with pytest.raises(ProtocolError, match="rank 7 uses a schema that it never announced"):
        _read_all(bytes(message))


def _schema(*fields: FieldSpec, none: tuple[str, ...] = ()) -> SampleSchema:
    return SampleSchema(fields, none)


IDS = FieldSpec("ids", torch.int64, 1)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (_schema(IDS, FieldSpec("more", torch.bool, 0)), "'more' is missing on rank 0 and 0-dim"),
        (
            _schema(FieldSpec("ids", torch.int32, 1)),
            "'ids' is 1-dim torch.int64 on rank 0 and 1-di",
        ),
        (_schema(FieldSpec("ids", torch.int64, 2)), "'ids' is 1-dim .* and 2-dim torch.int64 on r"),
        (_schema(none=("ids",)), "'ids' is 1-dim torch.int64 on rank 0 and None on rank 2"),
        (_schema(), "'ids' is 1-dim torch.int64 on rank 0 and missing on rank 2"),
    ],
)
def test_ranks_with_other_fields_are_named(other: SampleSchema, told: str) -> None:
    with pytest.raises(MismatchError, match=told):
        check_same_schema([[_schema(IDS)], [], [other]])


def test_plain_values_may_differ() -> None:
    values = FieldSpec("\\values", torch.uint8, 1)
    check_same_schema([[_schema(values, IDS)], [_schema(IDS)]])
