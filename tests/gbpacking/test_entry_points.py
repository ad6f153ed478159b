"""The spec's two functions: in Megatron-Core's loop on main and dev, in ours on releases."""

import logging
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from evenstep.balance import SequenceLoad
from evenstep.gbpacking import (
    PackingOptions,
    Sample,
    build_unpacked_sample,
    choose_scheduler,
    entry_points,
    get_batch_for_global_batch_packing,
    probe_global_batch_packing_support,
    register_with_megatron,
    wrap_data_iterator_for_global_batch_packing,
)
from evenstep.gbpacking.choice import choice_for
from evenstep.gbpacking.configured import microbatch_multiple, virtual_pipeline_size
from evenstep.gbpacking.stage import mtp_reads_here
from tests.gbpacking.stand_ins import Calls, dev_module, install, main_module


class Group:
    """A process group as seen without communication."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def groups(*, tp: Group | None = None) -> Any:
    return SimpleNamespace(tp=tp or Group(), cp=Group(), pp=Group(), dp=Group())


def config(scheduler: str, **settings: object) -> SimpleNamespace:
    defaults = {
        "sequence_packing_scheduler": scheduler,
        "max_seqlen_per_dp_cp_rank": 10,
        "hidden_size": 64,
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    choice_for.cache_clear()
    yield
    choice_for.cache_clear()


@pytest.fixture(params=["main", "dev"])
def generation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ModuleType, Calls]:
    calls = Calls()
    module = main_module(calls) if request.param == "main" else dev_module(calls)
    install(monkeypatch, module)
    return request.param, module, calls


def test_megatrons_scheduler_runs_where_it_is_registered(
    generation: tuple[str, ModuleType, Calls],
) -> None:
    name, _, calls = generation
    model_config, pg = config("dp_balanced"), groups()
    loader: Iterator[Sample] = iter([])
    result = wrap_data_iterator_for_global_batch_packing(loader, model_config, 3, pg)
    assert result == (loader, 3, 10.0, 100.0)
    batch: tuple[object, ...] = get_batch_for_global_batch_packing(
        None, model_config, pg_collection=pg, vp_stage=None
    )
    mask = "padding_mask" if name == "dev" else None
    assert batch == ("tokens", "labels", "loss_mask", None, "position_ids", None, mask)
    (_, wrap), (_, fetch) = calls
    assert wrap["config"] is model_config
    assert wrap["pg_collection"] is fetch["pg_collection"] is pg
    assert ("config" in fetch) is ("dynamic_cp" in fetch) is (name == "dev")
    assert fetch["vp_stage"] is None


def test_only_tensor_parallel_rank_0_passes_its_iterator_on(
    generation: tuple[str, ModuleType, Calls],
) -> None:
    calls = generation[2]
    wrap_data_iterator_for_global_batch_packing(
        iter([]), config("dp_balanced"), 3, groups(tp=Group(1, 2))
    )
    assert calls[0][1]["data_iterator"] is None


def test_ours_can_be_registered_with_megatrons_own_loop(
    generation: tuple[str, ModuleType, Calls],
) -> None:
    name, module, calls = generation
    assert choose_scheduler(config("evenstep_balanced")).loop == "evenstep"
    for _ in range(2):  # twice is once
        assert register_with_megatron(SequenceLoad.from_hidden_size(64)) == "evenstep_balanced"
    assert probe_global_batch_packing_support("evenstep_balanced") is None
    assert choose_scheduler(config("evenstep_balanced")).loop == "megatron-core"
    if name == "main":
        key = module.PackingScheduler("evenstep_balanced")
        assert key is module.PackingScheduler["EVENSTEP_BALANCED"]
        assert key.value == "evenstep_balanced"
        assert list(module.PackingScheduler)[-1] is key
    else:
        key = "evenstep_balanced"
    registered = module.scheduler_map[key](5, 2, 2, None)
    assert isinstance(registered, module.DpBalancedScheduler)
    groups_of_ids = registered.get_groups_and_subsamples([(0, 9), (1, 1), (2, 4), (3, 6)])
    assert all(len(microbatch) == 4 for microbatch in groups_of_ids)
    for microbatch in groups_of_ids:
        assert microbatch[0] == microbatch[1]  # the CP ranks of one data-parallel rank
        assert microbatch[2] == microbatch[3]
    packed = sorted(i for microbatch in groups_of_ids for pack in microbatch[::2] for i in pack)
    assert packed == [0, 1, 2, 3]
    wrap_data_iterator_for_global_batch_packing(iter([]), config("evenstep_balanced"), 1, groups())
    assert calls[-1][0] == "wrap"


def test_a_release_without_a_registry_says_that_nothing_is_to_be_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"no scheduler registry.*run evenstep_balanced there"):
        register_with_megatron(SequenceLoad())


def test_the_choice_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    with caplog.at_level(logging.INFO, logger="evenstep.gbpacking.choice"):
        for _ in range(3):
            choice = choose_scheduler(config("dp_balanced"))
    assert choice.loop == "evenstep"
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "dp_balanced runs in evenstep's loop" in message
    assert "has no packing scheduler" in message


@pytest.mark.parametrize(
    ("model_config", "message"),
    [
        (config(""), "sequence_packing_scheduler is not set"),
        (config("nonesuch"), "is 'nonesuch'; Megatron-Core.*evenstep itself runs dp_balanced"),
        (config("evenstep_balanced", dynamic_context_parallel=True), "with dynamic_context"),
        (config("evenstep_balanced", max_seqlen_per_dp_cp_rank=None), "max_seqlen_per_dp_cp_rank"),
        (config("evenstep_balanced", hidden_size=None), "hidden_size is None"),
        (
            config(
                "evenstep_balanced",
                virtual_pipeline_model_parallel_size=2,
                microbatch_group_size_per_vp_stage="x",
            ),
            "microbatch_group_size_per_vp_stage is 'x' on the model's configuration; it must be",
        ),
        (
            Mock(sequence_packing_scheduler="evenstep_balanced"),
            "max_seqlen_per_dp_cp_rank is <Mock",
        ),
    ],
)
def test_configurations_that_cannot_be_packed_with_are_refused(
    monkeypatch: pytest.MonkeyPatch, model_config: SimpleNamespace, message: str
) -> None:
    install(monkeypatch, None)
    with pytest.raises(ValueError, match=message):
        wrap_data_iterator_for_global_batch_packing(iter([]), model_config, 1, groups())


def test_that_no_scheduler_is_named_is_told_only_where_nobody_runs_megatrons_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Exception] = []
    monkeypatch.setattr(entry_points, "fail_step", lambda _, error: told.append(error))
    for module, times in ((main_module(Calls()), 0), (None, 1)):
        install(monkeypatch, module)
        with pytest.raises(ValueError, match="sequence_packing_scheduler is not set"):
            wrap_data_iterator_for_global_batch_packing(iter([]), config(""), 1, groups())
        assert len(told) == times


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_num_microbatches_is_a_positive_integer(
    monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    install(monkeypatch, None)
    with pytest.raises(ValueError, match=r"num_microbatches is .*positive integer"):
        wrap_data_iterator_for_global_batch_packing(
            iter([]),
            config("dp_balanced"),
            count,
            groups(),
            options=PackingOptions(device=torch.device("cpu")),
        )


def test_a_configuration_that_answers_everything_counts_as_its_integers_say() -> None:
    answers_all, pg = Mock(), groups()
    assert virtual_pipeline_size(answers_all) is None
    assert microbatch_multiple(answers_all, pg) == 1
    assert not mtp_reads_here(answers_all, pg, vp_stage=None, vp_size=None)
    answers_all.mtp_num_layers = 1  # its layout is none either
    assert mtp_reads_here(answers_all, pg, vp_stage=None, vp_size=None)
    assert virtual_pipeline_size(Mock(virtual_pipeline_model_parallel_size=True)) is None


def samples() -> list[Sample]:
    return [
        build_unpacked_sample([n] * length, [n] * length) for n, length in enumerate([4, 9, 6, 1])
    ]


def test_ours_returns_megatrons_rerun_iterator_which_replays() -> None:
    machine = pytest.importorskip("megatron.core.rerun_state_machine")
    options = PackingOptions(device=torch.device("cpu"))
    packed, count, total, squares = wrap_data_iterator_for_global_batch_packing(
        iter(samples()), config("evenstep_balanced"), 4, groups(), options=options
    )
    assert type(packed) is machine.RerunDataIterator
    assert packed is not None
    assert not isinstance(packed, list)
    assert (count, total, squares) == (2, 20.0, 134.0)
    state = machine.get_rerun_state_machine()
    mode = state.get_mode()
    state.mode = machine.RerunMode.VALIDATE_RESULTS
    try:
        first = [next(packed) for _ in range(count)]
        packed.rewind()
        again = [next(packed) for _ in range(count)]
    finally:
        state.mode = mode
    for one, other in zip(first, again, strict=True):  # some releases replay copies
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_interleaved_chunks_get_an_iterator_each_and_strip_what_they_do_not_read() -> None:
    pytest.importorskip("megatron.core")
    model_config = config(
        "evenstep_balanced",
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=2,
    )
    pg = groups()
    options = PackingOptions(device=torch.device("cpu"))
    chunks, count, *_ = wrap_data_iterator_for_global_batch_packing(
        [iter(samples()), None], model_config, 4, pg, options=options
    )
    assert isinstance(chunks, list)
    assert count == 2
    for stage, (chunk, keys) in enumerate(zip(chunks, [(0, 4), (1, 2)], strict=True)):
        batch = get_batch_for_global_batch_packing(
            chunk, model_config, pg_collection=pg, vp_stage=stage, device=torch.device("cpu")
        )
        there = tuple(i for i, part in enumerate(batch[:5]) if part is not None)
        assert there == keys
        assert batch[5] is not None
        assert batch[5].cp_group is pg.cp
        assert batch[6] is not None
        assert batch[6].shape == (1, int(batch[5].cu_seqlens_q_padded[-1]))


def test_a_stage_without_an_iterator_on_tp_rank_above_0_gets_none() -> None:
    from evenstep.gbpacking.entry_points import _iterator_for_tp_rank

    loader: Iterator[Sample] = iter([])
    assert _iterator_for_tp_rank(loader, groups()) is loader
    assert _iterator_for_tp_rank(loader, groups(tp=Group(1, 2))) is None
