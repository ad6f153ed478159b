"""Where a rank stands in the model, and which fields it needs there."""

from collections.abc import Sequence
from typing import Final, Protocol

from torch.distributed import ProcessGroup

from evenstep.gbpacking.sample import TOKEN_KEYS

_FIRST_STAGE_KEYS: Final = ("tokens", "position_ids")
_LAST_STAGE_KEYS: Final = ("labels", "loss_mask")


class ModelGroups(Protocol):
    """The process groups of a rank, as in Megatron-Core's `ProcessGroupCollection`.

    Attributes:
        tp: Ranks that share each layer.
        cp: Ranks that share each sequence.
        pp: Ranks that hold the layers one after the other.
        dp: Ranks that hold the same layers and see other samples, without `cp`.
    """

    tp: ProcessGroup
    cp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup


def needed_keys(
    pp_rank: int, pp_size: int, *, vp_stage: int | None, vp_size: int | None, has_mtp: bool
) -> tuple[str, ...]:
    """Return the per-token fields that one model chunk reads, in the order of `TOKEN_KEYS`.

    The first stage embeds, the last one computes the loss; those between need only the metadata.

    Args:
        pp_rank: The pipeline stage.
        pp_size: Pipeline stages.
        vp_stage: The model chunk of an interleaved stage; None for all chunks of the stage.
        vp_size: Model chunks per stage, None or 1 without interleaving.
        has_mtp: Whether the chunk predicts several tokens, which reads every field.
    """
    if has_mtp:
        return TOKEN_KEYS
    is_first = pp_rank == 0 and vp_stage in {None, 0}
    is_last = pp_rank == pp_size - 1 and vp_stage in {None, (vp_size or 1) - 1}
    wanted = (*(_FIRST_STAGE_KEYS if is_first else ()), *(_LAST_STAGE_KEYS if is_last else ()))
    return tuple(key for key in TOKEN_KEYS if key in wanted)


def mtp_reads_here(
    model_config: object, groups: ModelGroups, *, vp_stage: int | None, vp_size: int | None
) -> bool:
    """Return whether layers that predict several tokens (MTP) live in this model chunk.

    Without a custom pipeline layout they follow the last chunk; with one, whatever it places may be
    theirs, so a chunk counts if its part of the layout names them.
    """
    num_layers = getattr(model_config, "mtp_num_layers", None)
    if type(num_layers) is not int or num_layers < 1:
        return False
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    layout = getattr(model_config, "pipeline_model_parallel_layout", None)
    placed = getattr(layout, "layout", None)
    if not isinstance(placed, Sequence):
        return stage == last and vp_stage in {None, (vp_size or 1) - 1}
    chunks = placed[stage] if vp_stage is None else [placed[stage][vp_stage]]
    return any(getattr(layer, "name", None) == "mtp" for chunk in chunks for layer in chunk)
