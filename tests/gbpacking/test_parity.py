"""The proof on the real model: a packed step on many ranks is the unpacked step on one process."""

from typing import Any, NamedTuple

import pytest

from tests.harness import RankPools

pytest.importorskip("megatron.core")

WORLD_SIZE = 4
STEPS = 2
NUM_MICROBATCHES = 6
TOKENS_PER_RANK = 600


class Layout(NamedTuple):
    """How the four ranks are used."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    replicas: int = 1


def _packed_steps(rank: int, _: int, scheduler: str, layout: Layout) -> dict[str, Any]:
    """Run `STEPS` packed steps without updating weights; return losses, gradients and packs."""
    import torch
    import torch.distributed as dist
    from gpt.groups import Parallelism, model_groups
    from gpt.model import ModelSize, build_model, summed_loss, transformer_config
    from gpt.text import samples_of_rank

    from evenstep.gbpacking import (
        get_batch_for_global_batch_packing,
        padding_multiple,
        wrap_data_iterator_for_global_batch_packing,
    )

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
    model = build_model(config, size, groups)
    loader = samples_of_rank(
        _documents(),
        rank=groups.dp.rank(),
        num_ranks=groups.dp.size(),
        num_microbatches=NUM_MICROBATCHES,
        multiple=padding_multiple(context_parallel_size=layout.cp),
    )
    losses, tokens, sums, counts = [], [], [], []
    for _step in range(STEPS):
        packed, num_microbatches, *statistics = wrap_data_iterator_for_global_batch_packing(
            loader if groups.tp.rank() == 0 else None, config, NUM_MICROBATCHES, groups
        )
        counts.append(num_microbatches)
        sums.append(statistics)
        loss = torch.zeros((), dtype=torch.float64)
        seen: list[list[int]] = []
        for _microbatch in range(num_microbatches):
            ids, labels, mask, attention_mask, positions, params, padding = (
                get_batch_for_global_batch_packing(
                    packed, config, pg_collection=groups, vp_stage=None
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
        gradients[name] = parameter.grad.numpy()
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


def _documents() -> list[bytes]:
    from gpt.text import shuffled, standard_library_documents

    return shuffled(standard_library_documents(max_bytes=400), seed=3)


def _unpacked_steps(rank: int, _: int, num_samples: int) -> dict[str, Any]:
    """The reference: rank 0 alone, one unpadded sample after another, no pack in sight."""
    import torch
    import torch.distributed as dist
    from gpt.groups import Parallelism, model_groups
    from gpt.model import ModelSize, build_model, summed_loss, transformer_config
    from gpt.text import sample_of

    from evenstep.gbpacking.sample import TOKEN_KEYS

    groups = model_groups(Parallelism())
    if rank > 0:
        dist.barrier()
        return {}
    size = ModelSize(positions=1024)
    torch.manual_seed(7)
    model = build_model(transformer_config(size), size, groups)
    documents = _documents()
    losses = []
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for index in range(step * num_samples, (step + 1) * num_samples):
            sample = sample_of(documents[index])
            tokens, labels, mask, positions = (sample[key].unsqueeze(0) for key in TOKEN_KEYS)
            part = summed_loss(model, (tokens, labels, mask, positions))
            part.backward()  # type: ignore[no-untyped-call] # untyped in torch
            loss += part.detach()
        losses.append(loss.item())
    dist.barrier()
    return {
        "losses": losses,
        "gradients": {name: p.grad.numpy() for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("scheduler", ["evenstep_balanced", "dp_balanced"])
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, replicas=2), Layout(dp=4), Layout(dp=2, cp=2), Layout(dp=2, tp=2)],
    ids=["dp2", "dp4", "dp2-cp2", "dp2-tp2"],
)
def test_a_packed_step_is_the_unpacked_step(
    ranks: RankPools, scheduler: str, layout: Layout
) -> None:
    num_samples = layout.dp * NUM_MICROBATCHES
    import numpy as np

    # Importing Megatron-Core takes the ranks long, the first time.
    reference = ranks(WORLD_SIZE).run(_unpacked_steps, num_samples, deadline_s=170)[0]
    results = ranks(WORLD_SIZE).run(_packed_steps, scheduler, layout)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["counts"] == results[0]["counts"]
        assert result["sums"] == results[0]["sums"]
        for name, whole in reference["gradients"].items():
            shard, dim = result["shards"].get(name, (0, 0))
            expected = np.split(whole, layout.tp if name in result["shards"] else 1, dim)[shard]
            error = abs(result["gradients"][name] - expected).max()
            assert error <= 1e-4 * abs(expected).max(), name
    _assert_every_token_once(results, num_samples, copies=layout.tp * layout.replicas)


def _assert_every_token_once(
    results: list[dict[str, Any]], num_samples: int, *, copies: int
) -> None:
    documents = _documents()
    for step in range(STEPS):
        held = [
            token
            for result in results
            for microbatch in result["tokens"][step]
            for token in microbatch
        ]
        drawn = documents[step * num_samples : (step + 1) * num_samples]
        assert sorted(held) == sorted(byte for document in drawn * copies for byte in document[:-1])
