"""Dynamic context parallelism without other ranks: plans, slices, choice, registration, loss."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.balance import SequenceLoad
from evenstep.gbpacking import (
    DYNAMIC_CP_SCHEDULERS,
    DYNAMIC_SCHEDULERS,
    DynamicCpOptions,
    PackingOptions,
    PackingSettings,
    build_unpacked_sample,
    choose_scheduler,
    cp_group_of,
    follow_cp_groups,
    packing_violations,
    padding_multiple,
    probe_global_batch_packing_support,
    register_dynamic_with_megatron,
    token_loss,
    wrap_data_iterator_for_global_batch_packing,
    zigzag_indices,
)
from evenstep.gbpacking.choice import choice_for
from evenstep.gbpacking.dynamic_plan import DynamicStepRules, group_sizes
from evenstep.gbpacking.dynamic_slices import cut, planned_slices
from evenstep.gbpacking.follow_cp import _Follow
from evenstep.gbpacking.loss import step_loss
from evenstep.gbpacking.step_lengths import StepLengths
from tests.gbpacking.stand_ins import Calls, dev_module, install, main_module

NAMES = sorted(DYNAMIC_SCHEDULERS)


def rules(
    *, tokens_per_rank: int, num_ranks: int, multiple: int = 1, name: str = "evenstep_dynamic_cp"
) -> DynamicStepRules:
    return DynamicStepRules(
        scheduler=name,
        tokens_per_rank=tokens_per_rank,
        num_ranks=num_ranks,
        multiple=multiple,
        min_cp_size=1,
        load=SequenceLoad.from_hidden_size(64),
        options=DynamicCpOptions(),
    )


def lengths_of(padded: Sequence[int]) -> StepLengths:
    return StepLengths(
        counts=tuple((1,) for _ in padded), padded=tuple(padded), original=tuple(padded)
    )


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    choice_for.cache_clear()
    yield
    choice_for.cache_clear()


# ---- plans: faults 22 to 27 ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("padded", "num_ranks", "tokens_per_rank", "multiple"),
    [
        ([1, 6], 7, 8, 1),
        ([5, 5], 5, 8, 1),
        ([8, 4], 3, 8, 2),
        ([17], 3, 8, 1),
        ([4, 4], 2, 8, 1),
        ([4, 4, 4, 4], 2, 8, 4),
        ([3, 3, 3], 8, 8, 1),
        ([60, 60, 60], 1, 100, 1),
        ([95] * 5 + [20] * 5, 2, 100, 2),
        ([1], 4, 8, 1),
    ],
)
def test_feasible_steps_are_planned_within_all_limits(
    name: str, padded: list[int], num_ranks: int, tokens_per_rank: int, multiple: int
) -> None:
    step_rules = rules(
        tokens_per_rank=tokens_per_rank, num_ranks=num_ranks, multiple=multiple, name=name
    )
    plan = step_rules.plan(lengths_of(padded))
    assert plan.num_microbatches % multiple == 0
    for groups in plan.microbatches:
        assert [group.start for group in groups] == [
            sum(group.size for group in groups[:i]) for i in range(len(groups))
        ]
        assert sum(group.size for group in groups) == num_ranks  # no rank is idle
        for group in groups:
            assert group.sequences
            assert group.size in step_rules.group_sizes
            assert group.start % group.size == 0
            assert sum(padded[i] for i in group.sequences) <= tokens_per_rank * group.size
    planned = [i for groups in plan.microbatches for group in groups for i in group.sequences]
    assert sorted(planned) == list(range(len(padded)))


def test_the_capacity_of_a_rank_is_a_hard_limit() -> None:
    plan = rules(tokens_per_rank=100, num_ranks=1).plan(lengths_of([60, 60, 60]))
    assert plan.num_microbatches == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("padded", "num_ranks", "multiple", "message"),
    [
        ([4, 33], 4, 1, r"lengths\[1\] is 33, more than the 32 tokens of all 4 ranks of 8"),
        ([4], 2, 2, "1 sequences cannot fill a multiple of 2 micro-batches"),
        ([4, 0], 2, 1, r"lengths\[1\] is 0"),
    ],
)
def test_impossible_steps_are_refused_with_numbers(
    name: str, padded: list[int], num_ranks: int, multiple: int, message: str
) -> None:
    step_rules = rules(tokens_per_rank=8, num_ranks=num_ranks, multiple=multiple, name=name)
    with pytest.raises(ValueError, match=message):
        step_rules.plan(lengths_of(padded))


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((8, 1, None), (1, 2, 4, 8)),
        ((8, 2, None), (2, 4, 8)),
        ((6, 1, None), (1, 2, 4, 6)),
        ((12, 1, (1, 3, 6)), (1, 3, 6, 12)),
        ((1, 1, None), (1,)),
    ],
)
def test_group_sizes_are_those_of_the_planner(
    arguments: tuple[int, int, tuple[int, ...] | None], sizes: tuple[int, ...]
) -> None:
    assert group_sizes(*arguments) == sizes


# ---- slices ----


@settings(max_examples=50, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    dp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    name=st.sampled_from(NAMES),
)
def test_every_rank_gets_its_slices_from_one_that_has_read_the_sample(
    chunks: list[int], dp: int, cp: int, name: str
) -> None:
    padded = [2 * dp * cp * chunk for chunk in chunks]
    plan = rules(tokens_per_rank=24, num_ranks=dp * cp, name=name).plan(lengths_of(padded))
    lengths = replace(
        lengths_of(padded),
        counts=tuple(tuple(int(i % dp == rank) for rank in range(dp)) for i in range(len(padded))),
    )
    holders = lengths.holders
    assert [home for home, _ in holders] == [i % dp for i in range(len(padded))]
    assert [local for _, local in holders] == [i // dp for i in range(len(padded))]
    by_holder = {holder: index for index, holder in enumerate(holders)}
    slices = planned_slices(plan, holders, cp_size=cp)
    assert [one.source for one in slices] == sorted(one.source for one in slices)
    found = set()
    for one in slices:
        index = by_holder[one.source // cp, one.local_index]
        group = plan.group_of(one.route.dst_slot, one.route.owner_rank)
        assert group.sequences[one.route.canonical_pos] == index
        assert one.cp_size == group.size
        assert one.cp_rank == one.route.owner_rank - group.start
        if one.route.owner_rank // cp == one.source // cp:
            assert one.source == one.route.owner_rank  # what a rank has read is not sent to it
        found.add((index, one.route.owner_rank))
    assert len(found) == len(slices)
    assert len(slices) == sum(
        group.size * len(group.sequences) for groups in plan.microbatches for group in groups
    )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_cut_sample_is_the_zigzag_of_a_pack_of_it_alone(cp_size: int) -> None:
    sample = build_unpacked_sample(list(range(24)), list(range(24)), multiple=8)
    fields = {key: sample[key] for key in ("tokens", "loss_mask")}
    for cp_rank in range(cp_size):
        index = zigzag_indices(torch.tensor([0, 24]), cp_size=cp_size, cp_rank=cp_rank)
        part = cut(fields, cp_size, cp_rank)
        assert torch.equal(part["tokens"], sample["tokens"][index])
        assert torch.equal(part["loss_mask"], sample["loss_mask"][index])


def test_a_sample_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"12 tokens.*group of 4 needs a multiple of 8"):
        cut({"tokens": torch.arange(12)}, 4, 0)


def test_samples_are_padded_for_the_largest_group() -> None:
    sizes = {"data_parallel_size": 4, "context_parallel_size": 2, "dynamic_context_parallel": True}
    assert padding_multiple(**sizes) == 16  # type: ignore[arg-type] # by name
    assert (
        padding_multiple(**sizes, tensor_parallel_size=2, sequence_parallel=True)  # type: ignore[arg-type] # by name
        == 32
    )


# ---- choice, configuration, registration ----


class Group:
    """A process group as seen without communication."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def config(scheduler: str = "evenstep_dynamic_cp", **changes: object) -> SimpleNamespace:
    values = {
        "sequence_packing_scheduler": scheduler,
        "dynamic_context_parallel": True,
        "max_seqlen_per_dp_cp_rank": 8,
        "hidden_size": 64,
        **changes,
    }
    return SimpleNamespace(**values)


def model_groups(**changes: object) -> Any:
    alone = Group()
    return SimpleNamespace(**{**dict.fromkeys(("tp", "cp", "pp", "dp", "dp_cp"), alone), **changes})


@pytest.mark.parametrize("name", NAMES)
def test_ours_runs_both_schedulers_where_megatron_has_none(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, None)
    assert choose_scheduler(config(name)).loop == "evenstep"
    install(monkeypatch, main_module(Calls()))
    choice_for.cache_clear()
    assert choose_scheduler(config(name)).loop == "evenstep"
    with pytest.raises(ValueError, match="with dynamic_context_parallel=True default_dynamic_cp"):
        choose_scheduler(config(name, dynamic_context_parallel=False))


def test_megatron_dev_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DYNAMIC_CP_SCHEDULERS == ("default_dynamic_cp",)
    install(monkeypatch, dev_module(Calls()))
    assert choose_scheduler(config("default_dynamic_cp")).loop == "megatron-core"
    assert choose_scheduler(config("evenstep_dynamic_cp")).loop == "evenstep"


def test_ours_can_be_registered_with_megatron_dev(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dev_module(Calls())
    install(monkeypatch, module)
    for _ in range(2):  # twice is once
        assert register_dynamic_with_megatron(SequenceLoad()) == "evenstep_dynamic_cp"
    assert probe_global_batch_packing_support("evenstep_dynamic_cp", dynamic_cp=True) is None
    assert choose_scheduler(config()).loop == "megatron-core"
    base = module.scheduler_map["default_dynamic_cp"]
    scheduler = module.scheduler_map["evenstep_dynamic_cp"](8, 2, 2, None)
    assert isinstance(scheduler, base)
    packs = scheduler.get_groups_and_subsamples([(7, 30), (3, 4), (5, 8), (9, 12)])
    assert all(len(microbatch) == 4 for microbatch in packs)
    assert all(ids for microbatch in packs for ids in microbatch)
    sizes: dict[int, int] = {}
    for microbatch in packs:
        for ids in microbatch:
            for sample in ids:
                sizes[sample] = sizes.get(sample, 0) + 1
    assert set(sizes) == {3, 5, 7, 9}
    assert sizes[7] == 4  # Megatron-Core counts the ranks that hold a sample


@pytest.mark.parametrize("module", [None, main_module])
def test_without_a_dynamic_scheduler_nothing_is_to_be_registered(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    install(monkeypatch, module and module(Calls()))
    with pytest.raises(RuntimeError, match=r"no scheduler registry.*run evenstep_dynamic_cp there"):
        register_dynamic_with_megatron(SequenceLoad())


@pytest.mark.parametrize(
    ("model_config", "groups", "options", "message"),
    [
        (config(mtp_num_layers=1), model_groups(), None, "mtp_num_layers is 1 with dynamic"),
        (config(multi_latent_attention=True), model_groups(), None, "multi_latent_attention is"),
        (config(is_hybrid_model=True), model_groups(), None, "is_hybrid_model is True"),
        (config(), model_groups(dp_cp=None), None, "the process groups have no dp_cp"),
        (config(), model_groups(dp_cp=Group(1, 2)), None, "this is rank 1 of 2 in dp_cp"),
        (config(), model_groups(), PackingOptions(), "takes DynamicCpOptions"),
        (
            config("dp_balanced", dynamic_context_parallel=False),
            model_groups(),
            DynamicCpOptions(),
            "takes PackingOptions",
        ),
        (config(max_seqlen_per_dp_cp_rank=None), model_groups(), None, "max_seqlen_per_dp_cp"),
        (config(hidden_size=None), model_groups(), None, "hidden_size is None"),
    ],
)
def test_configurations_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, model_config: Any, groups: Any, options: Any, message: str
) -> None:
    install(monkeypatch, None)
    with pytest.raises(ValueError, match=message):
        wrap_data_iterator_for_global_batch_packing(
            iter([]), model_config, 1, groups, options=options
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": "evenstep_dynamic_cp", "dynamic_context_parallel": False}, "set it to True"),
        ({"scheduler": "dp_balanced"}, "set it to False"),
        ({"data_parallel_size": 3}, "set it to at least 1366"),
    ],
)
def test_settings_that_contradict_dynamic_cp_are_named(
    change: dict[str, object], message: str
) -> None:
    good = PackingSettings(
        micro_batch_size=1,
        max_sequence_length=4096,
        max_seqlen_per_dp_cp_rank=1024,
        calculate_per_token_loss=True,
        average_in_collective=False,
        dynamic_context_parallel=True,
        scheduler="default_dynamic_cp",
        data_parallel_size=4,
    )
    assert packing_violations(good) == []
    *_, last = packing_violations(replace(good, **change))  # type: ignore[arg-type] # by name
    assert message in str(last)


def test_a_group_that_no_step_has_made_is_named() -> None:
    domain: Any = Group(0, 4)
    assert cp_group_of(domain, 1) is None
    with pytest.raises(RuntimeError, match="no context-parallel group of 2 ranks"):
        cp_group_of(domain, 2)


# ---- loss ----


def test_the_loss_is_a_sum_and_counts_tokens_with_a_weight() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    part = token_loss(losses, torch.tensor([[1.0, 0.5, 0.0, 0.25]]))
    part.loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
    assert part.loss.item() == 4.0
    assert part.num_tokens.item() == 3
    assert part.reduced["lm loss"].tolist() == [4.0, 3.0]
    assert losses.grad is not None
    assert losses.grad.tolist() == [[1.0, 0.5, 0.0, 0.25]]


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4), cuts=st.data())
def test_the_loss_does_not_depend_on_where_tokens_lie(weights: list[float], cuts: Any) -> None:
    losses = torch.tensor([1.0, 20.0, 300.0, 4000.0])
    owner = torch.tensor(cuts.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)))
    mask = torch.tensor(weights)
    whole = token_loss(losses, mask).reduced["lm loss"]
    parts = [token_loss(losses[owner == r], mask[owner == r]).reduced["lm loss"] for r in range(3)]
    assert torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-12)


def test_a_loss_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="losses has 3 elements and loss_mask 4"):
        token_loss(torch.ones(3), torch.ones(4))
    domain: Any = Group()
    with pytest.raises(ValueError, match="parts is empty"):
        step_loss([], domain)


# ---- rotary positions ----


def test_a_layer_follows_the_group_of_each_microbatch() -> None:
    layer: Any = torch.nn.Module()
    layer.pg_collection = SimpleNamespace(cp="static")
    follow = _Follow("static")
    follow(layer, (), {"packed_seq_params": SimpleNamespace(local_cp_size=2, cp_group="pair")})
    assert layer.pg_collection.cp == "pair"
    follow(layer, (), {"packed_seq_params": SimpleNamespace(local_cp_size=1, cp_group=None)})
    assert (layer.pg_collection.cp.rank(), layer.pg_collection.cp.size()) == (0, 1)
    for params in (None, SimpleNamespace(local_cp_size=None, cp_group="static")):
        follow(layer, (), {"packed_seq_params": params})
        assert layer.pg_collection.cp == "static"


def test_only_megatrons_models_can_follow() -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(ValueError, match="Linear has no attention layer of Megatron-Core's"):
        follow_cp_groups(torch.nn.Linear(1, 1))
