"""Binding the CP group."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from evenstep.gbpacking import finalize_packed_seq_params, megatron_api


def params(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"cp_group": None, "local_cp_size": None, **fields})


def test_the_static_group_is_bound_and_a_dynamic_one_kept() -> None:
    groups = SimpleNamespace(cp="static")
    packed = params()
    assert finalize_packed_seq_params(packed, groups) is packed
    assert packed.cp_group == "static"
    dynamic = params(cp_group="dynamic", local_cp_size=2)
    finalize_packed_seq_params(dynamic, groups)
    assert dynamic.cp_group == "dynamic"
    alone = params(local_cp_size=1)
    finalize_packed_seq_params(alone, groups)
    assert alone.cp_group is None
    assert finalize_packed_seq_params(None, groups) is None


def test_the_route_is_prebuilt_where_megatron_has_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def prebuild_thd_cp_partition_route(packed_seq_params: object, cp_group: object) -> None:
        built.append((packed_seq_params, cp_group))

    module = ModuleType("megatron.core.packed_seq_params")
    module.__dict__["prebuild_thd_cp_partition_route"] = prebuild_thd_cp_partition_route
    monkeypatch.setitem(sys.modules, module.__name__, module)
    megatron_api.thd_cp_route_prebuilder.cache_clear()
    try:
        packed = params()
        finalize_packed_seq_params(packed, SimpleNamespace(cp="static"))
        assert built == [(packed, "static")]
    finally:
        megatron_api.thd_cp_route_prebuilder.cache_clear()
