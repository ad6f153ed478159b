"""All ranks in one process: their plans, their bytes, and an all-to-all made of copies."""

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.exchange import HOST_MEMORY, Agreement, HostMemory, Moves, Offer, plan_moves
from evenstep.exchange.payload_group import Piece, chunks
from evenstep.serialize import pack_samples, unfold_values, unpack_sample
from tests.exchange.samples import agreed, offer_of, round_robin, shown


def _all_to_all(
    sent: list[torch.Tensor], received: list[torch.Tensor], pieces: list[Iterator[Piece]]
) -> None:
    """Run the ranks' collectives side by side; each side's splits must match the other's."""
    for step in zip(*pieces, strict=True):
        for receiver, (into, recv_splits, _, _) in enumerate(step):
            room = received[receiver][into].split_with_sizes(list(recv_splits))
            for sender, (_, _, out_of, send_splits) in enumerate(step):
                data = sent[sender][out_of].split_with_sizes(list(send_splits))[receiver]
                assert data.numel() == recv_splits[sender]
                room[sender].copy_(data)


def _plans(agreements: list[Agreement]) -> list[Moves]:
    return [
        plan_moves(
            round_robin(agreement),
            holders=agreement.holders,
            nbytes=agreement.nbytes,
            rank=rank,
            world_size=len(agreements),
        )
        for rank, agreement in enumerate(agreements)
    ]


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    chunk_words=st.integers(1, 40),
)
def test_every_sample_arrives_once_in_chunks_of_any_size(
    counts: list[list[int]], chunk_words: int
) -> None:
    agreements = agreed([offer_of(rank, slots) for rank, slots in enumerate([*counts, [1]])])
    moves = _plans(agreements)
    sent = [
        pack_samples([agreement.samples[p.local_idx] for to in mine.sends for p in to])
        for agreement, mine in zip(agreements, moves, strict=True)
    ]
    received = [torch.empty(sum(mine.recv_splits), dtype=torch.uint8) for mine in moves]
    pieces = [chunks(mine, rank, 8 * chunk_words) for rank, mine in enumerate(moves)]
    _all_to_all(sent, received, pieces)
    for rank, (mine, buffer) in enumerate(zip(moves, received, strict=True)):
        offset = 0
        for source, places in enumerate(mine.receives):
            for place in places:
                layout = agreements[rank].reports[source].layout(place.local_idx)
                flat = unfold_values(unpack_sample(buffer, layout, offset))
                offset += layout.nbytes
                assert shown(flat) == shown(agreements[source].offer.samples[place.local_idx])
        assert offset == buffer.numel()


def test_chunks_are_bounded_and_equally_many_on_all_ranks() -> None:
    agreements = agreed([offer_of(0, [9]), offer_of(1, [1]), offer_of(2, [])])
    moves = _plans(agreements)
    steps = [[*chunks(mine, rank, 64)] for rank, mine in enumerate(moves)]
    assert len(steps[0]) == len(steps[1]) == len(steps[2]) > 3
    for pieces in steps:
        assert all(sum(recv) <= 64 and sum(send) <= 64 for _, recv, _, send in pieces)


def test_a_change_of_one_cost_changes_no_plan_of_another_rank() -> None:
    offers = [offer_of(0, [4]), offer_of(1, [4])]
    assert len({mine.digest for mine in _plans(agreed(offers))}) == 1
    larger = Offer(samples=offer_of(2, [4]).samples, slot_counts=[4], costs=offer_of(1, [4]).costs)
    assert _plans(agreed([offers[0], larger]))[0].digest != _plans(agreed(offers))[0].digest


def test_host_memory_comes_back_when_the_last_tensor_is_gone() -> None:
    memory = HostMemory()
    first = memory.empty([3 << 20], torch.uint8)
    address = first.data_ptr()
    view = first[1 << 20 :].view(torch.int32)
    del first
    other = memory.empty([3 << 20], torch.uint8)
    assert other.data_ptr() != address  # a view still needs it
    del view
    again = memory.empty([5 << 17, 4], torch.bool)
    assert again.data_ptr() == address
    assert again.shape == (5 << 17, 4)
    assert again.is_contiguous()


def test_host_memory_keeps_no_more_than_was_in_use() -> None:
    memory = HostMemory()
    for size in (2, 4, 8, 16):
        memory.empty([size << 20], torch.uint8)
    memory.empty([1 << 20], torch.uint8)
    kept = sum(size * len(regions) for size, regions in memory._free.items())
    assert kept == memory._bytes_free <= 1.25 * (16 << 20)


def _spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return where tensors begin and end, sorted."""
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40) | st.none(), max_size=40), st.randoms(use_true_random=False))
def test_host_memory_in_use_is_not_handed_out_twice(
    wanted: list[int | None], random: Random
) -> None:
    memory = HostMemory()
    held: list[torch.Tensor] = []
    for pages in wanted:
        if pages is not None:
            held.append(memory.empty([(1 << 17) + (pages << 14)], torch.uint8))
        elif held:
            held.pop(random.randrange(len(held)))
        assert all(end <= start for (_, end), (start, _) in pairwise(_spans(held)))
    memory._take_back()
    regions = [lease.region for lease in memory._leases.values()]
    assert len(regions) == len(held)
    assert sum(map(len, regions)) == memory._bytes_in_use


def test_host_memory_serves_many_threads() -> None:
    memory = HostMemory()

    def fill(mark: int) -> bool:
        """Return whether what this thread writes stays until it looks."""
        unharmed = True
        for turn in range(60):
            first = memory.empty([1 << 17], torch.uint8).fill_(mark)
            second = memory.empty([(1 << 17) + (turn << 10)], torch.uint8).fill_(mark + 1)
            unharmed &= bool((first == mark).all() & (second == mark + 1).all())
        return unharmed

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(0, 16, 2)))
    memory._take_back()
    assert memory._bytes_in_use == len(memory._leases) == 0


def test_host_memory_forgets_what_was_in_use_before_a_fork() -> None:
    memory = HostMemory()
    inherited = memory.empty([1 << 20], torch.uint8).fill_(3)
    memory.forget()  # as in the child
    own = memory.empty([1 << 20], torch.uint8).fill_(4)
    assert own.data_ptr() != inherited.data_ptr()
    assert bool((inherited == 3).all())
    del inherited
    memory._take_back()
    assert memory._bytes_free == 0  # it belongs to the parent
    assert memory._bytes_in_use == own.nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_keeps_what_the_parent_writes_over() -> None:
    memory = HostMemory()
    tensor = memory.empty([1 << 20], torch.uint8).fill_(3)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0 if ctypes.string_at(tensor.data_ptr(), 4) == b"\3\3\3\3" else 1)
    tensor.fill_(4)
    os.write(tell, b"!")
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("shape", [[0], [], [2, 0, 3], [7], [1 << 18, 2]])
def test_host_memory_gives_any_shape(shape: list[int]) -> None:
    tensor = HOST_MEMORY.empty(shape, torch.float64).fill_(2.5)
    assert list(tensor.shape) == shape
    assert tensor.sum() == 2.5 * tensor.numel()


def test_more_host_memory_than_there_is_fails_as_in_torch() -> None:
    with pytest.raises(RuntimeError):
        HOST_MEMORY.empty([1 << 60], torch.uint8)
