"""Bind a micro-batch's metadata to the context-parallel group it runs on."""

from typing import Protocol, TypeVar

from torch.distributed import ProcessGroup

from evenstep.gbpacking.megatron_api import call_with_accepted, thd_cp_route_prebuilder


class HasCpGroup(Protocol):
    """Of a process-group collection, what binding needs."""

    cp: ProcessGroup


class BindsCpGroup(Protocol):
    """Of Megatron-Core's `PackedSeqParams`, what binding needs."""

    cp_group: ProcessGroup | None


PackedT = TypeVar("PackedT", bound=BindsCpGroup)


def finalize_packed_seq_params(
    packed_seq_params: PackedT | None, pg_collection: HasCpGroup
) -> PackedT | None:
    """Bind the CP group to one micro-batch and prebuild its THD CP partition route.

    `pg_collection.cp` is the static group: attention then runs on the group that the model was
    built with. A group that a scheduler attached (dynamic context parallelism) is kept.
    A Megatron-Core with context-parallel layout routes gets the route built here, off the forward
    path; others partition without one. Calling it twice changes nothing.

    Args:
        packed_seq_params: The micro-batch's metadata; None is returned as it is.
        pg_collection: The model's process groups.

    Returns:
        The same object.
    """
    if packed_seq_params is None:
        return None
    # Only if missing: a dynamic group of one rank is announced by local_cp_size without a group.
    if packed_seq_params.cp_group is None and getattr(packed_seq_params, "local_cp_size", 0) != 1:
        packed_seq_params.cp_group = pg_collection.cp
    prebuild = thd_cp_route_prebuilder()
    if prebuild is not None:
        call_with_accepted(
            prebuild,
            packed_seq_params=packed_seq_params,
            cp_group=packed_seq_params.cp_group,
            pg_collection=pg_collection,
        )
    return packed_seq_params
