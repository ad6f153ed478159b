"""One training run: a packed step is wrap, then fetch, forward and backward per micro-batch."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from evenstep.balance import SequenceLoad
from evenstep.gbpacking import (
    PackingOptions,
    Sample,
    get_batch_for_global_batch_packing,
    padding_multiple,
    wrap_data_iterator_for_global_batch_packing,
)
from gpt.model import build_model, summed_loss, transformer_config
from gpt.options import Options
from gpt.record import RunRecord, StepRecord
from gpt.text import samples_of_rank, shuffled, standard_library_documents

ONE_BY_ONE = "one document per micro-batch"


def train(
    scheduler: str,
    options: Options,
    groups: ProcessGroupCollection,
    device: torch.device,
    steps: Iterator[int],
) -> RunRecord:
    """Train from the seed with the named scheduler, or `ONE_BY_ONE`.

    Args:
        scheduler: How micro-batches are formed.
        options: The command line's.
        groups: This rank's process groups.
        device: Where the model is.
        steps: Counts the steps, and shows them.
    """
    config = transformer_config(
        options.model,
        context_parallel_size=options.context_parallel,
    )
    # Set after construction: releases have no such field, main and dev check it against their own.
    config.sequence_packing_scheduler = "dp_balanced" if scheduler == ONE_BY_ONE else scheduler
    config.max_seqlen_per_dp_cp_rank = options.tokens_per_rank
    # Only the gradients' sum at the end of a step makes ranks wait here.
    packing = PackingOptions(
        synchronize="step", max_sequences=1 if scheduler == ONE_BY_ONE else None, device=device
    )
    torch.manual_seed(options.seed)
    model = build_model(config, options.model, groups).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader = open_loader(options, groups)
    records = []
    for _ in steps:
        start = time.perf_counter()
        loss, packs = train_step(model, optimizer, loader, config, options, groups, packing)
        seconds = time.perf_counter() - start
        gathered: list[StepRecord | None] = [None] * groups.dp.size()
        mine = StepRecord(seconds=seconds, loss=loss, packs=packs)
        dist.all_gather_object(gathered, mine, group=groups.dp)
        records.append([record for record in gathered if record is not None])
    return RunRecord(
        name=scheduler,
        steps=records,
        capacity=options.tokens_per_rank * options.context_parallel,
        load=SequenceLoad.from_hidden_size(options.model.hidden),
    )


def train_step(
    model: GPTModel,
    optimizer: torch.optim.Optimizer,
    loader: Iterator[Sample],
    config: TransformerConfig,
    options: Options,
    groups: ProcessGroupCollection,
    packing: PackingOptions,
) -> tuple[float, list[list[int]]]:
    """Take one optimizer step; return its loss and the lengths that this rank packed."""
    packed, num_microbatches, *_ = wrap_data_iterator_for_global_batch_packing(
        loader, config, options.documents_per_rank, groups, options=packing
    )
    # [summed loss, tokens with a loss]: summed over micro-batches and ranks, divided once.
    totals = torch.zeros(2, dtype=torch.float64)
    packs = []
    for _ in range(num_microbatches):
        tokens, labels, loss_mask, _, position_ids, params, _ = get_batch_for_global_batch_packing(
            packed, config, pg_collection=groups, vp_stage=None
        )
        # Without pipeline stages, every stage's fields are here.
        assert tokens is not None
        assert labels is not None
        assert loss_mask is not None
        assert position_ids is not None
        assert params is not None
        loss = summed_loss(model, (tokens, labels, loss_mask, position_ids), params)
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        totals += torch.stack([loss.detach(), loss_mask.double().sum()]).cpu()
        packs.append(params.cu_seqlens_q_padded.diff().tolist())
    on_device = totals.to(next(model.parameters()).device)
    dist.all_reduce(on_device, group=groups.dp_cp)
    loss_sum, num_tokens = on_device.tolist()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups.dp_cp)
        parameter.grad /= num_tokens
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum / num_tokens, packs


def open_loader(options: Options, groups: ProcessGroupCollection) -> Iterator[Sample]:
    """Start this rank's share of the documents from its beginning."""
    return samples_of_rank(
        shuffled(standard_library_documents(max_bytes=options.longest + 1), options.seed),
        rank=groups.dp.rank(),
        num_ranks=groups.dp.size(),
        num_microbatches=options.documents_per_rank,
        multiple=padding_multiple(context_parallel_size=groups.cp.size()),
    )
