"""The blocks of `docs/packing-with-megatron-core.md` are one script that trains."""

import re

import pytest

from tests.examples.launch import ROOT
from tests.harness import RankPools

pytest.importorskip("megatron.core")

PAGE = ROOT / "docs" / "packing-with-megatron-core.md"
# Megatron-Core's schedules need CUDA; the loop below them on the page does the same.
NEEDS_CUDA = "get_forward_backward_func"
DOCUMENTS, LONGEST = 32, 60  # both data-parallel ranks read eight documents a step


def _train(_: int, __: int, page: str) -> tuple[float, int, int]:
    import torch

    from gpt.groups import Parallelism, model_groups
    from gpt.model import ModelSize, build_model, transformer_config

    size = ModelSize(positions=LONGEST + 4)
    config = transformer_config(size, context_parallel_size=2)
    torch.manual_seed(0)
    model = build_model(config, size, model_groups(Parallelism(context=2)))
    lengths = torch.randint(2, LONGEST, (DOCUMENTS,)).tolist()
    session = {
        "config": config,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "documents": [torch.randint(0, 256, (length,)).tolist() for length in lengths],
    }
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if NEEDS_CUDA not in block:
            exec(compile(block, PAGE.name, "exec"), session)
    indices = [*session["sampler"]][:8]
    mine = sum(lengths[index] - 1 for index in indices)
    return session["mean_loss"], session["num_tokens"], mine


def test_the_blocks_make_a_step(ranks: RankPools) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(NEEDS_CUDA) == 2  # its import and its call, in one block
    results = ranks(4).run(_train, page, deadline_s=400)
    losses = {loss for loss, _, _ in results}
    assert len(losses) == 1
    assert 4 < losses.pop() < 8  # ln 256 is 5.5
    # Context-parallel ranks read the same documents.
    tokens = sum(mine for _, _, mine in results) // 2
    assert {counted for _, counted, _ in results} == {tokens}
