"""Token-level rewards and generalized advantage estimation (GAE), for PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaydb.domain import checks
from replaydb.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place the reward of each sequence on its last token in the loss.

    Args:
        rewards: Reward of each sequence, [N]; NaN (none) becomes 0.
        mask: Loss mask, bool [N, L].

    Returns:
        Token rewards, [N, L]; 0 at all other tokens, and in sequences without a token in the loss.
    """
    import torch

    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    last = positions == positions.amax(dim=1, keepdim=True) if mask.shape[1] else mask
    return torch.where(last & mask, rewards.nan_to_num(0.0)[:, None], 0.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    discount: float = 1.0,
    decay: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates (GAE) over the tokens in the loss.

    `A_t = sum_k (discount * decay)^k d_(t+k)` with `d_t = r_t + discount * V_(t+1) - V_t`. Here
    t + 1 is the next token in the loss of the same row, so tokens between turns are skipped, and
    the value after the last one is 0 (Schulman et al., 2016). The sums take log2(L) passes over
    all rows at once.

    Args:
        rewards: Token rewards, [N, L]: `token_extras["token_rewards"]`, or
            `terminal_rewards(...)`. Rewards outside the mask are ignored.
        values: Value estimates of the state before each token, [N, L]. No gradients flow through
            them.
        mask: Loss mask, bool [N, L].
        discount: Gamma, 0 to 1.
        decay: Lambda, 0 to 1.

    Returns:
        Advantages, and returns (advantages + values) as targets of the value function; both
        [N, L], 0 outside the mask.

    Raises:
        InvalidInputError: Shapes differ, or a number is out of range.
    """
    import torch

    if not rewards.shape == values.shape == mask.shape:
        shapes = f"{list(rewards.shape)}, {list(values.shape)}, {list(mask.shape)}"
        raise InvalidInputError("rewards, values, mask", "one shape", shapes)
    gamma = checks.number("discount", discount, least=0.0, most=1.0)
    factor = gamma * checks.number("decay", decay, least=0.0, most=1.0)
    # Move the tokens in the loss to the front, in their order; the rest is 0.
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    chosen = mask.gather(1, order)
    dense_values = torch.where(chosen, values.detach().gather(1, order), 0.0)
    following = torch.nn.functional.pad(dense_values[:, 1:], (0, 1))
    sums = torch.where(chosen, rewards.gather(1, order) + gamma * following - dense_values, 0.0)
    span = 1
    while span < mask.shape[1]:
        sums = sums + factor * torch.nn.functional.pad(sums[:, span:], (0, span))
        span, factor = 2 * span, factor * factor
    found = torch.zeros_like(sums).scatter_(1, order, torch.where(chosen, sums, 0.0))
    return found, torch.where(mask, found + values.detach(), 0.0)
