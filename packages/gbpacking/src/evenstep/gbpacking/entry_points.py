"""The two functions of a training step: pack its global batch, fetch one packed micro-batch.

Both run Megatron-Core's scheduler where it has the one that is configured, and ours elsewhere; see
`choose_scheduler`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from evenstep.gbpacking.choice import DYNAMIC_SCHEDULERS, SchedulerChoice, choose_scheduler
from evenstep.gbpacking.configured import step_scheduler, virtual_pipeline_size
from evenstep.gbpacking.dynamic_configured import dynamic_step_scheduler, with_domain
from evenstep.gbpacking.dynamic_groups import cp_group_of
from evenstep.gbpacking.dynamic_plan import DynamicCpOptions
from evenstep.gbpacking.dynamic_step import DynamicStepScheduler
from evenstep.gbpacking.enabled import dynamic_context_parallel_enabled
from evenstep.gbpacking.fetch import fetch_packed
from evenstep.gbpacking.finalize import finalize_packed_seq_params
from evenstep.gbpacking.fixed_step import FixedStepScheduler
from evenstep.gbpacking.links import communication_device
from evenstep.gbpacking.megatron_api import call_with_accepted, has_scheduler_api, scheduler_api
from evenstep.gbpacking.pull import LoaderItem
from evenstep.gbpacking.sample import Sample
from evenstep.gbpacking.stage import ModelGroups, mtp_reads_here, needed_keys
from evenstep.gbpacking.step_plan import PackingOptions
from evenstep.gbpacking.step_reading import fail_step
from evenstep.gbpacking.thd import make_packed_seq_params, padding_mask

if TYPE_CHECKING:
    # Megatron-Core is an extra: imported where it is needed, and never before.
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.rerun_state_machine import RerunDataIterator

LoaderIterator: TypeAlias = Iterator[LoaderItem] | list[Iterator[LoaderItem] | None] | None
"""A loader's iterator; a list of them, one per model chunk, under interleaving; None for none."""

PackedIterator: TypeAlias = "RerunDataIterator | list[RerunDataIterator | None] | None"
"""The packed iterator; a list of them, one per model chunk, under interleaving."""

PackedStepResult: TypeAlias = tuple[PackedIterator, int, float, float]

PackedBatch: TypeAlias = tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    None,
    torch.Tensor | None,
    "PackedSeqParams | None",
    torch.Tensor | None,
]
"""tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params, padding_mask."""


def wrap_data_iterator_for_global_batch_packing(
    data_iterator: LoaderIterator,
    model_config: object,
    num_microbatches: int,
    pg_collection: ModelGroups,
    *,
    options: PackingOptions | DynamicCpOptions | None = None,
) -> PackedStepResult:
    """Pack this step's global batch into THD micro-batches.

    Pulls `num_microbatches` samples per data-parallel rank, agrees on their lengths, plans packs
    over the whole global batch, moves each sample to the rank that packs it, and returns the packed
    iterator. Every rank of the model must call it, once per step.

    A failure on one rank raises on all of them, in our own loop, also if it lies in the arguments
    of that rank alone; a later step may then succeed. It is told over the groups of
    `pg_collection`, so what cannot be told is that there are none, and, where the installed
    Megatron-Core has a scheduler too, a configuration that names none: in whose loop the others are
    is not known then.

    Args:
        data_iterator: Yields samples, or lists of samples. Read on tensor-parallel rank 0 only;
            pipeline stages between the first and the last may pass None, on all of a stage's
            data-parallel ranks.
        model_config: Megatron-Core's `TransformerConfig`.
        num_microbatches: Micro-batches of one sample each to pull.
        pg_collection: The model's process groups.
        options: Tuning of our own scheduler, `DynamicCpOptions` under dynamic context parallelism.
            It must be alike on all ranks.

    Returns:
        `(packed_iterator, packed_num_microbatches, seqlen_sum, seqlen_squared_sum)`. The packed
        iterator is a `RerunDataIterator` on tensor-parallel rank 0 and None on others (a list of
        these under interleaving), so "already wrapped" needs a flag of its own. The sums are
        statistics over all data-parallel ranks, of padded lengths, for FLOPs accounting; they are
        exact up to 2**53.

    Raises:
        ValueError: If the arguments cannot be packed with, or the samples do not fit.
        ExchangeError: If another rank failed.
    """
    choice = _choice(model_config, pg_collection)
    local_iterator = _iterator_for_tp_rank(data_iterator, pg_collection)
    if choice.loop == "megatron-core":
        wrap, _ = scheduler_api()
        wrapped = call_with_accepted(
            wrap,
            data_iterator=local_iterator,
            config=model_config,
            num_microbatches=num_microbatches,
            pg_collection=pg_collection,
        )
        return cast("PackedStepResult", wrapped)
    try:
        scheduler = _own_scheduler(choice.name, model_config, pg_collection, options)
    except Exception as error:
        fail_step(pg_collection, error)
        raise
    packed = scheduler.run(_one_iterator(local_iterator), num_microbatches)
    return (
        _rerun_iterators(packed.microbatches, virtual_pipeline_size(model_config)),
        packed.plan.num_microbatches,
        float(packed.lengths.token_sum),
        float(packed.lengths.token_squared_sum),
    )


def get_batch_for_global_batch_packing(
    data_iterator: PackedIterator,
    model_config: object,
    *,
    pg_collection: ModelGroups,
    vp_stage: int | None,
    device: torch.device | None = None,
) -> PackedBatch:
    """Fetch one packed micro-batch and its `PackedSeqParams` on every rank.

    The pack is sliced for this rank of the CP group and broadcast over TP. Every tensor-parallel
    rank must call it, in the same order.

    Args:
        data_iterator: The packed iterator of this model chunk, None off tensor-parallel rank 0; or
            what the wrapping returned under interleaving, of which the chunk's own is taken.
        model_config: Megatron-Core's `TransformerConfig`.
        pg_collection: The model's process groups.
        vp_stage: The model chunk under interleaving, else None.
        device: Where the batch is put; None for where the tensor-parallel group communicates.

    Returns:
        `(tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params,
        padding_mask)`, each tensor `[1, tokens]`; `attention_mask` is always None for THD. What
        this pipeline stage does not read is None; `packed_seq_params`, with its CP group bound, and
        `padding_mask` (True over padding) are there on every stage.

    Raises:
        RuntimeError: On every tensor-parallel rank, if there is no further packed micro-batch.
    """
    choice = choose_scheduler(model_config)
    own = data_iterator[vp_stage or 0] if isinstance(data_iterator, list) else data_iterator
    vp_size = virtual_pipeline_size(model_config)
    has_mtp = mtp_reads_here(model_config, pg_collection, vp_stage=vp_stage, vp_size=vp_size)
    if choice.loop == "megatron-core":
        _, fetch = scheduler_api()
        batch = call_with_accepted(
            fetch,
            data_iterator=own,
            vpp_size=vp_size,
            mtp_on_this_rank=has_mtp,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            dynamic_cp=dynamic_context_parallel_enabled(model_config),
            config=model_config,
        )
        return _seven(cast("PackedBatch", batch), pg_collection)
    pp, cp = pg_collection.pp, pg_collection.cp
    keys = needed_keys(pp.rank(), pp.size(), vp_stage=vp_stage, vp_size=vp_size, has_mtp=has_mtp)
    fields, max_seqlen, local_cp_size = fetch_packed(
        own,
        keys=keys,
        tp=pg_collection.tp,
        cp=cp,
        device=device or communication_device(pg_collection.tp),
    )
    borders = (fields["cu_seqlens"], fields["cu_seqlens_padded"])
    rows = {key: fields[key].unsqueeze(0) for key in keys}
    params = make_packed_seq_params(*borders, max_seqlen)
    if local_cp_size:
        params.local_cp_size = local_cp_size
        params.cp_group = cp_group_of(with_domain(pg_collection).dp_cp, local_cp_size)
    group = params.cp_group if local_cp_size else cp
    return (
        rows.get("tokens"),
        rows.get("labels"),
        rows.get("loss_mask"),
        None,
        rows.get("position_ids"),
        finalize_packed_seq_params(params, pg_collection),
        # Never None: whether it is there decides which collectives MoE layers issue, so it must
        # not differ between ranks.
        padding_mask(
            *borders,
            cp_size=1 if group is None else group.size(),
            cp_rank=0 if group is None else group.rank(),
        ),
    )


def _iterator_for_tp_rank(
    data_iterator: LoaderIterator, pg_collection: ModelGroups
) -> LoaderIterator:
    """Return the iterator on tensor-parallel rank 0 and None elsewhere."""
    return data_iterator if pg_collection.tp.rank() == 0 else None


def _choice(model_config: object, groups: ModelGroups) -> SchedulerChoice:
    try:
        return choose_scheduler(model_config)
    except ValueError as error:
        # In Megatron-Core's loop, rounds of ours would meet collectives of another kind.
        if not has_scheduler_api():
            fail_step(groups, error)
        raise


def _own_scheduler(
    name: str,
    model_config: object,
    groups: ModelGroups,
    options: PackingOptions | DynamicCpOptions | None,
) -> FixedStepScheduler | DynamicStepScheduler:
    if name in DYNAMIC_SCHEDULERS:
        if options is None or isinstance(options, DynamicCpOptions):
            return dynamic_step_scheduler(name, model_config, groups, options)
    elif options is None or isinstance(options, PackingOptions):
        return step_scheduler(name, model_config, groups, options)
    raise ValueError(
        f"options is {options!r} for the scheduler {name!r}; it takes "
        f"{'DynamicCpOptions' if name in DYNAMIC_SCHEDULERS else 'PackingOptions'}"
    )


def _one_iterator(data_iterator: LoaderIterator) -> Iterator[LoaderItem] | None:
    """Return the iterator to read from: interleaved chunks of a stage pass one each, all alike."""
    if isinstance(data_iterator, list):
        return next((iterator for iterator in data_iterator if iterator is not None), None)
    return data_iterator


def _rerun_iterators(microbatches: list[Sample] | None, vp_size: int | None) -> PackedIterator:
    """Return Megatron-Core's rerun iterator over the micro-batches, one per model chunk."""
    from megatron.core.rerun_state_machine import (  # noqa: PLC0415 # an extra
        RerunDataIterator,
    )

    iterators = [
        None if microbatches is None else RerunDataIterator(iter(microbatches))
        for _ in range(vp_size or 1)
    ]
    return iterators[0] if vp_size is None else iterators


def _seven(batch: PackedBatch, groups: ModelGroups) -> PackedBatch:
    """Return Megatron-Core's batch with a padding mask, None where that release has none."""
    tokens, labels, loss_mask, _, position_ids, params, *rest = batch
    params = finalize_packed_seq_params(params, groups)
    return tokens, labels, loss_mask, None, position_ids, params, rest[0] if rest else None
