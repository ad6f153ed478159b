"""Steps of the real model under dynamic context parallelism, and the same unpacked on one rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

LENGTHS = [330, 21, 64, 9, 130, 45, 3, 88, 17, 30, 112, 71, 5, 52, 26, 40]
"""Tokens of the samples of one step: on `DOMAIN_TOKENS`, groups of one rank up to all."""

DOMAIN_TOKENS = 384


class Layout(NamedTuple):
    """How four ranks are used; the domain is dp x cp."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    rotary: bool = False


def build(groups: Any, *, rotary: bool, **settings: object) -> tuple[Any, Any]:
    """Return configuration and model, with rotary or learned positions, equal on all ranks."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from gpt.attention import PackedAttention
    from gpt.model import ModelSize, transformer_config

    config = transformer_config(ModelSize(), apply_rope_fusion=False, **settings)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(7)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=256,
        max_sequence_length=512,
        position_embedding_type="rope" if rotary else "learned_absolute",
        pg_collection=groups,
    )
    return config, model


def on_cpu() -> AbstractContextManager[object]:
    """Let Megatron-Core's rotary embedding, which always moves to the GPU, stay here."""
    return mock.patch("torch.cuda.current_device", return_value="cpu")


def sample_of(index: int, *, multiple: int = 1) -> Any:
    """Return sample `index` of the step: random tokens, one weight in eight 0."""
    import torch

    from evenstep.gbpacking import build_unpacked_sample

    draw = torch.Generator().manual_seed(index)
    tokens = torch.randint(256, (LENGTHS[index] + 1,), generator=draw)
    weights = (torch.rand(LENGTHS[index], generator=draw) > 1 / 8).float()
    return build_unpacked_sample(tokens[:-1], tokens[1:], loss_mask=weights, multiple=multiple)


def dynamic_step(_: int, __: int, scheduler: str, layout: Layout) -> dict[str, Any]:
    """Run one packed step; return its loss, its gradients, and what this rank saw."""
    import torch.distributed as dist

    from evenstep.gbpacking import (
        destroy_cp_groups,
        follow_cp_groups,
        get_batch_for_global_batch_packing,
        padding_multiple,
        step_loss,
        token_loss,
        wrap_data_iterator_for_global_batch_packing,
    )
    from gpt.groups import Parallelism, model_groups

    groups = model_groups(Parallelism(tensor=layout.tp, context=layout.cp))
    config, model = build(
        groups,
        rotary=layout.rotary,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
    )
    if layout.rotary:
        follow_cp_groups(model)
    config.sequence_packing_scheduler = scheduler
    config.dynamic_context_parallel = True
    config.max_seqlen_per_dp_cp_rank = DOMAIN_TOKENS // (layout.dp * layout.cp)
    multiple = padding_multiple(
        context_parallel_size=layout.cp,
        data_parallel_size=layout.dp,
        dynamic_context_parallel=True,
    )
    mine = range(groups.dp.rank(), len(LENGTHS), layout.dp)
    loader: Iterator[Any] = (sample_of(index, multiple=multiple) for index in mine)
    packed, num_microbatches, *sums = wrap_data_iterator_for_global_batch_packing(
        loader if groups.tp.rank() == 0 else None, config, len(mine), groups
    )
    parts, sizes, tokens = [], [], []
    for _microbatch in range(num_microbatches):
        ids, labels, mask, _none, positions, params, padding = get_batch_for_global_batch_packing(
            packed, config, pg_collection=groups, vp_stage=None
        )
        assert ids is not None
        assert mask is not None
        assert padding is not None
        assert params is not None
        size = params.local_cp_size
        assert (params.cp_group is None) is (size == 1)
        assert size == 1 or params.cp_group.size() == size
        assert ids.shape == mask.shape == padding.shape
        assert ids.numel() * size == params.cu_seqlens_q_padded[-1]
        with on_cpu():
            losses = model(ids, positions, None, labels=labels, packed_seq_params=params)
        part = token_loss(losses, mask)
        part.loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        parts.append(part)
        sizes.append(size)
        tokens.append(ids[~padding].tolist())
    loss = step_loss(parts, groups.dp_cp)
    gradients, shards = {}, {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=groups.dp_cp)
        gradients[name] = (parameter.grad / loss.num_tokens).numpy()
        if getattr(parameter, "tensor_model_parallel", False):
            shards[name] = (groups.tp.rank(), parameter.partition_dim)
    destroy_cp_groups()
    return {
        "loss": loss,
        "gradients": gradients,
        "shards": shards,
        "sizes": sizes,
        "sums": sums,
        "tokens": tokens,
    }


def unpacked_step(rank: int, _: int, rotary: bool) -> dict[str, Any]:
    """The reference: rank 0 alone, one unpadded sample after another, no pack in sight."""
    import torch
    import torch.distributed as dist

    from gpt.groups import Parallelism, model_groups

    groups = model_groups(Parallelism())
    if rank > 0:
        dist.barrier()
        return {}
    _, model = build(groups, rotary=rotary)
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for index in range(len(LENGTHS)):
        sample = {key: value.unsqueeze(0) for key, value in sample_of(index).items()}
        with on_cpu():
            losses = model(sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
        loss = (losses * sample["loss_mask"]).double().sum()
        loss.backward()
        total += loss.detach()
        num_tokens += int(sample["loss_mask"].sum())
    dist.barrier()
    return {
        "loss": (total.item() / num_tokens, num_tokens),
        "gradients": {n: (p.grad / num_tokens).numpy() for n, p in model.named_parameters()},
    }
