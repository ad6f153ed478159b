"""Steps of the real model, packed on many ranks and unpacked on one, for tests and benchmarks."""

from typing import Any, NamedTuple

STEPS = 2
NUM_MICROBATCHES = 6
LONGEST = 300
TOKENS_PER_RANK = 450


class Layout(NamedTuple):
    """How the ranks are used; each replica is a run of its own."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    replicas: int = 1


def packed_steps(
    rank: int, _: int, scheduler: str, layout: Layout, device_name: str = "cpu"
) -> dict[str, Any]:
    """Run `STEPS` packed steps without updating weights; return losses, gradients and packs."""
    import torch
    import torch.distributed as dist

    from evenstep.gbpacking import (
        PackingOptions,
        get_batch_for_global_batch_packing,
        padding_multiple,
        wrap_data_iterator_for_global_batch_packing,
    )
    from gpt.groups import Parallelism, model_groups
    from gpt.model import ModelSize, build_model, summed_loss, transformer_config
    from gpt.text import samples_of_rank

    device = torch.device(device_name)
    groups = model_groups(Parallelism(tensor=layout.tp, context=layout.cp))
    if layout.replicas > 1:  # several data-parallel groups, each a run of its own
        first = rank - rank % layout.dp
        pair = dist.new_group([*range(first, first + layout.dp)], use_local_synchronization=True)
        groups.dp = groups.dp_cp = pair
    size = ModelSize(positions=1024)
    config = transformer_config(
        size, tensor_model_parallel_size=layout.tp, context_parallel_size=layout.cp
    )
    config.sequence_packing_scheduler = scheduler
    config.max_seqlen_per_dp_cp_rank = TOKENS_PER_RANK
    torch.manual_seed(7)
    model = build_model(config, size, groups).to(device)
    loader = samples_of_rank(
        documents(),
        rank=groups.dp.rank(),
        num_ranks=groups.dp.size(),
        num_microbatches=NUM_MICROBATCHES,
        multiple=padding_multiple(context_parallel_size=layout.cp),
    )
    losses, tokens, sums, counts = [], [], [], []
    for _step in range(STEPS):
        packed, num_microbatches, *statistics = wrap_data_iterator_for_global_batch_packing(
            loader if groups.tp.rank() == 0 else None,
            config,
            NUM_MICROBATCHES,
            groups,
            options=PackingOptions(device=device),
        )
        counts.append(num_microbatches)
        sums.append(statistics)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        seen: list[list[int]] = []
        for _microbatch in range(num_microbatches):
            ids, labels, mask, attention_mask, positions, params, padding = (
                get_batch_for_global_batch_packing(
                    packed, config, pg_collection=groups, vp_stage=None, device=device
                )
            )
            assert attention_mask is None
            assert ids is not None
            assert labels is not None
            assert mask is not None
            assert positions is not None
            assert padding is not None
            assert params is not None
            assert params.cp_group is groups.cp
            assert torch.equal(padding, mask == 0)
            part = summed_loss(model, (ids, labels, mask, positions), params)
            part.backward()  # type: ignore[no-untyped-call] # untyped in torch
            loss += part.detach()
            seen.append(ids[~padding].tolist())
        dist.all_reduce(loss, group=groups.dp_cp)
        losses.append(loss.item())
        tokens.append(seen)
    gradients, shards = {}, {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=groups.dp_cp)
        gradients[name] = parameter.grad.cpu().numpy()
        if getattr(parameter, "tensor_model_parallel", False):
            shards[name] = (groups.tp.rank(), parameter.partition_dim)
    return {
        "losses": losses,
        "gradients": gradients,
        "shards": shards,
        "counts": counts,
        "sums": sums,
        "tokens": tokens,
    }


def documents() -> list[bytes]:
    from gpt.text import shuffled, standard_library_documents

    return shuffled(standard_library_documents(max_bytes=LONGEST), seed=3)


def unpacked_steps(rank: int, _: int, num_samples: int, device_name: str = "cpu") -> dict[str, Any]:
    """The reference: rank 0 alone, one unpadded sample after another, no pack in sight."""
    import torch
    import torch.distributed as dist

    from evenstep.gbpacking.sample import TOKEN_KEYS
    from gpt.groups import Parallelism, model_groups
    from gpt.model import ModelSize, build_model, summed_loss, transformer_config
    from gpt.text import sample_of

    groups = model_groups(Parallelism())
    if rank > 0:
        dist.barrier()
        return {}
    size = ModelSize(positions=1024)
    torch.manual_seed(7)
    device = torch.device(device_name)
    model = build_model(transformer_config(size), size, groups).to(device)
    drawn = documents()
    losses = []
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for index in range(step * num_samples, (step + 1) * num_samples):
            sample = sample_of(drawn[index])
            tokens, labels, mask, positions = (
                sample[key].unsqueeze(0).to(device) for key in TOKEN_KEYS
            )
            part = summed_loss(model, (tokens, labels, mask, positions))
            part.backward()  # type: ignore[no-untyped-call] # untyped in torch
            loss += part.detach()
        losses.append(loss.item())
    dist.barrier()
    return {
        "losses": losses,
        "gradients": {name: p.grad.cpu().numpy() for name, p in model.named_parameters()},
    }
