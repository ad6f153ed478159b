"""Every public name of the reference, with its parameters, their kinds, order and defaults."""

import inspect

import pytest

import evenstep.reorder_buffer as package
from evenstep.reorder_buffer import ReorderingBuffer

# As printed in the reference: `name(parameters)`, without annotations.
FUNCTIONS = """
balanced_index_order(costs, n_groups)
balanced_assignment(costs, n_groups, dp_size)
intra_route(assignment, *, src_slot=0)
build_window_route(costs_per_slot, n_groups, dp_size)
assert_intra_no_cross_slot(route, b_global)
window_cost_spread(costs_per_slot, route, dp_size)
sample_keys(meta)
tensor_metadata(flat)
serialize_sample(flat, keys)
sample_byte_size(meta, keys)
deserialize_sample(buf, offset, meta, keys)
prepare_sample_exchange(local_flats, local_global_indices, route, all_global_indices, \
all_tensor_meta, dp_rank, dp_size, *, window_size=1)
empty_like_vision(ref_hidden_states, ref_grid_thw)
patches_per_image(grid_thw)
split_microbatch(batch, *, cu_img=None)
merge_samples(flats)
sample_cost(flat, *, encoder_cost_weight, language_cost_weight=0.0, image_token_id=None, \
square_merge_size=1)
reassemble_window(local_flats, plan, recv_buf, all_tensor_meta, *, dp_size, window_size, local)
exchange_by_route(local_flats, route, all_global_indices, all_tensor_meta, *, dp_rank, dp_size, \
window_size, local, dp_group_nccl, nccl_stream=None)
exchange_window(batches, *, dp_rank, dp_size, n_groups, cost_of, dp_group_gloo, dp_group_nccl, \
nccl_stream=None, image_count_of=None, probe=False)
reorder_window_local(batches, *, n_groups, cost_of, image_count_of=None)
build_module_dp_process_groups(dp_group_nccl_main, *, overlap)
ReorderingBuffer(data_iterator, *, dp_rank, dp_size, n_groups, cost_of, dp_group_gloo, \
dp_group_nccl, overlap=True, image_count_of=None, window_size=1)
"""


@pytest.mark.parametrize("line", FUNCTIONS.strip().split("\n"), ids=lambda line: line.split("(")[0])
def test_name_has_the_parameters_of_the_reference(line: str) -> None:
    name, _, parameters = line.partition("(")
    namespace: dict[str, object] = {}
    exec(f"def reference({parameters}: ...", namespace)
    reference = inspect.signature(namespace["reference"])  # type: ignore[arg-type]  # a function
    assert name in package.__all__
    ours = inspect.signature(getattr(package, name)).parameters
    for parameter in reference.parameters.values():
        mine = ours[parameter.name]
        assert (mine.kind, mine.default) == (parameter.kind, parameter.default), parameter.name
    extra = [ours[key] for key in ours if key not in reference.parameters]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)
    assert [key for key in ours if key in reference.parameters] == [*reference.parameters]


def test_buffer_has_the_methods_of_the_reference() -> None:
    for name in ("__iter__", "__next__", "shutdown"):
        assert [*inspect.signature(getattr(ReorderingBuffer, name)).parameters] == ["self"]


def test_all_names_are_there() -> None:
    assert len({*package.__all__}) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
