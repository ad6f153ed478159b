"""What only looks at a configuration: the enabled checks, the probe, the rules of a run."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY, MagicMock

import pytest

from evenstep.gbpacking import (
    DYNAMIC_CP_SCHEDULERS,
    PackingSettings,
    check_packing_settings,
    dynamic_context_parallel_enabled,
    global_batch_packing_enabled,
    packing_violations,
    probe_global_batch_packing_support,
)
from tests.gbpacking.stand_ins import Calls, dev_module, install, main_module


def test_a_mock_that_answers_everything_enables_nothing() -> None:
    assert not global_batch_packing_enabled(MagicMock())
    assert not dynamic_context_parallel_enabled(MagicMock())
    assert not global_batch_packing_enabled(SimpleNamespace())
    assert not dynamic_context_parallel_enabled(None)


@pytest.mark.parametrize(
    ("scheduler", "enabled"),
    [("dp_balanced", True), ("anything", True), ("", False), (None, False), (True, False)],
)
def test_a_schedulers_name_enables_packing(scheduler: object, enabled: bool) -> None:
    config = SimpleNamespace(sequence_packing_scheduler=scheduler)
    assert global_batch_packing_enabled(config) is enabled


@pytest.mark.parametrize(("value", "enabled"), [(True, True), (1, False), ("yes", False)])
def test_only_true_itself_enables_dynamic_cp(value: object, enabled: bool) -> None:
    config = SimpleNamespace(dynamic_context_parallel=value)
    assert dynamic_context_parallel_enabled(config) is enabled


def test_the_dynamic_schedulers_of_the_spec_are_listed() -> None:
    assert "default_dynamic_cp" in DYNAMIC_CP_SCHEDULERS


def test_probe_says_that_the_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    reason = probe_global_batch_packing_support("dp_balanced")
    assert reason is not None
    assert "has no packing scheduler" in reason
    assert "dev branch" not in reason
    assert "dev branch" in str(probe_global_batch_packing_support("default_dynamic_cp"))


def test_probe_says_that_a_release_has_no_scheduler() -> None:
    pytest.importorskip("megatron.core")
    reason = probe_global_batch_packing_support("dp_balanced")
    assert reason is not None
    assert "has no wrap_data_iterator" in reason


def test_probe_on_main(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, main_module(Calls()))
    assert probe_global_batch_packing_support("dp_balanced") is None
    missing = probe_global_batch_packing_support("default_dynamic_cp", dynamic_cp=True)
    assert "registered are 'dp_balanced'." in str(missing)
    fetch = probe_global_batch_packing_support("dp_balanced", dynamic_cp=True)
    assert "does not accept config and dynamic_cp" in str(fetch)


def test_probe_on_dev(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, dev_module(Calls()))
    assert probe_global_batch_packing_support("dp_balanced") is None
    assert probe_global_batch_packing_support("default_dynamic_cp", dynamic_cp=True) is None
    missing = probe_global_batch_packing_support("nonesuch")
    assert "registered are 'default_dynamic_cp', 'dp_balanced'." in str(missing)


def test_probe_finds_entry_points_without_pg_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    module = main_module(Calls())

    def wrap_data_iterator(data_iterator: object, config: object, num_microbatches: int) -> None:
        """As it was before process groups were passed."""

    module.__dict__["wrap_data_iterator"] = wrap_data_iterator
    install(monkeypatch, module)
    reason = probe_global_batch_packing_support("dp_balanced")
    assert "wrap_data_iterator" in str(reason)
    assert "does not accept pg_collection" in str(reason)


GOOD = PackingSettings(
    micro_batch_size=1,
    max_sequence_length=4096,
    max_seqlen_per_dp_cp_rank=2048,
    calculate_per_token_loss=True,
    average_in_collective=False,
    context_parallel_size=2,
    pipeline_parallel_size=2,
    virtual_pipeline_size=2,
    microbatch_group_size_per_vp_stage=2,
    variable_seq_lengths=True,
)


def test_good_settings_pass() -> None:
    assert packing_violations(GOOD) == []
    check_packing_settings(GOOD)


@pytest.mark.parametrize(
    ("change", "setting", "remedy"),
    [
        ({"micro_batch_size": 2}, "micro_batch_size", "set micro_batch_size=1"),
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss", "=True"),
        ({"average_in_collective": True}, "average_in_collective", "=False"),
        ({"dataloader_type": "batch"}, "dataloader_type", "single, cyclic, external"),
        ({"cuda_graphs": "local"}, "cuda_graph_impl", 'set cuda_graph_impl="none"'),
        ({"other_packing": ("offline",)}, "other_packing", "switch off offline"),
        ({"max_seqlen_per_dp_cp_rank": None}, "max_seqlen_per_dp_cp_rank", "one rank's memory"),
        ({"max_seqlen_per_dp_cp_rank": 2047}, "max_seqlen_per_dp_cp_rank", "at least 2048"),
        ({"variable_seq_lengths": False}, "variable_seq_lengths", "=True"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel", "=False"),
        (
            {"pipeline_parallel_size": 1, "microbatch_group_size_per_vp_stage": None},
            "virtual_pipeline_size",
            "drop the virtual pipeline",
        ),
        (
            {"microbatch_group_size_per_vp_stage": 1},
            "microbatch_group_size_per_vp_stage",
            "set it to 2",
        ),
    ],
)
def test_each_violation_names_its_setting_and_remedy(
    change: dict[str, object], setting: str, remedy: str
) -> None:
    violations = packing_violations(replace(GOOD, **change))  # type: ignore[arg-type] # by name
    assert [violation.setting for violation in violations] == [setting]
    assert remedy in str(violations[0])


def test_a_misspelt_scheduler_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    misspelt = replace(GOOD, scheduler="evenstep_balancd")
    (violation,) = packing_violations(misspelt)
    assert violation.setting == "sequence_packing_scheduler"
    assert "choose one of dp_balanced, evenstep_balanced" in violation.remedy
    install(monkeypatch, main_module(Calls()))
    assert packing_violations(misspelt) == [violation._replace(rule=ANY)]
    assert packing_violations(replace(GOOD, scheduler="dp_balanced")) == []


def test_all_violations_are_listed_at_once() -> None:
    bad = replace(GOOD, micro_batch_size=4, average_in_collective=True, cuda_graphs="local")
    with pytest.raises(ValueError, match=r"micro_batch_size is 4.*\n.*average_in.*\n.*cuda_graph"):
        check_packing_settings(bad)


def test_settings_are_read_from_a_model_config() -> None:
    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=2048,
        calculate_per_token_loss=True,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=2,
        variable_seq_lengths=True,
        cuda_graph_impl="none",
    )
    settings = PackingSettings.from_model_config(
        config, micro_batch_size=1, max_sequence_length=4096, average_in_collective=False
    )
    assert settings == GOOD
    config.virtual_pipeline_model_parallel_size = True  # no number of chunks
    settings = PackingSettings.from_model_config(
        config, micro_batch_size=1, max_sequence_length=4096, average_in_collective=False
    )
    assert settings.virtual_pipeline_size is None


def test_settings_are_read_from_megatrons_own_config() -> None:
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config")
    config = transformer.TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    settings = PackingSettings.from_model_config(
        config, micro_batch_size=1, max_sequence_length=16, average_in_collective=False
    )
    assert {violation.setting for violation in packing_violations(settings)} == {
        "calculate_per_token_loss",
        "max_seqlen_per_dp_cp_rank",
    }
