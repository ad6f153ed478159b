"""The loss of a packed step: summed over tokens, divided once.

Ranks hold different shares of different sequences, in another way in every micro-batch. A mean over
a micro-batch, a rank or a context-parallel group would weigh a token by where it happened to lie.
So there is one rule: each rank sums `loss x weight` over the tokens that it holds; micro-batches
and all DP x CP ranks add up; one division follows, by the number of tokens with a weight in the
whole step. Gradients likewise: summed over DP x CP, divided by that number. Nothing is multiplied
by a context-parallel size. One rank holds a token, so it counts once, however the step was packed.

Megatron-Core does the summing and dividing with `calculate_per_token_loss=True` and
`average_in_collective=False`, given what `token_loss` returns.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class TokenLoss(NamedTuple):
    """Loss of one micro-batch on one rank: the three results of a Megatron-Core loss function.

    Attributes:
        loss: Sum over this rank's tokens, float64 scalar, to call `backward` on.
        num_tokens: How many of them have a weight other than 0, int64 scalar.
        reduced: `{"lm loss": [sum, tokens]}`, float64 `[2]`, without gradient, for logging.
    """

    loss: torch.Tensor
    num_tokens: torch.Tensor
    reduced: dict[str, torch.Tensor]


class StepLoss(NamedTuple):
    """Loss of a whole step, equal on all ranks.

    Attributes:
        mean: Loss per token.
        num_tokens: What the summed gradients are to be divided by.
    """

    mean: float
    num_tokens: int


def token_loss(losses: torch.Tensor, loss_mask: torch.Tensor) -> TokenLoss:
    """Return the summed loss of one micro-batch on this rank.

    Args:
        losses: Loss of each token, as the model returns it, of any shape.
        loss_mask: Weight of each, 0 over padding, with as many elements.

    Raises:
        ValueError: If the two have different numbers of elements.
    """
    if losses.numel() != loss_mask.numel():
        raise ValueError(
            f"losses has {losses.numel()} elements and loss_mask {loss_mask.numel()}; pass both as "
            "this rank holds them, the mask as get_batch_for_global_batch_packing returned it"
        )
    weights = loss_mask.reshape(-1)
    # float64: so many float32 summands would make the sum depend on their order.
    loss = (losses.reshape(-1) * weights).double().sum()
    # Not the sum of weights: Megatron-Core counts in whole tokens, and would cut fractions off,
    # in each micro-batch anew.
    num_tokens = weights.count_nonzero()
    return TokenLoss(
        loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.double()])}
    )


def step_loss(parts: Iterable[TokenLoss], domain: ProcessGroup) -> StepLoss:
    """Return the loss of a step from this rank's micro-batches; every rank of `domain` must call.

    Args:
        parts: This rank's micro-batches, at least one.
        domain: All DP x CP ranks of the model.

    Raises:
        ValueError: If there is no micro-batch; or, on all ranks, no token with a weight.
    """
    reduced = [part.reduced["lm loss"] for part in parts]
    if not reduced:
        raise ValueError("parts is empty; pass the loss of every micro-batch of the step")
    total = torch.stack(reduced).sum(0)
    dist.all_reduce(total, group=domain)
    loss, num_tokens = total.tolist()
    if not num_tokens:
        raise ValueError("no token of the step has a weight in its loss_mask; skip the step")
    return StepLoss(loss / num_tokens, int(num_tokens))
