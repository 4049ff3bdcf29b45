"""Off-policy corrections: importance ratios, clipping, staleness masks and statistics.

`logprobs` are log-probabilities under the policy being trained, `behaviour` the stored ones under
the policy that sampled the tokens, and `mask` is the loss mask. All have the same shape, padded
[N, L] or packed [R, C].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaydb.batch import PackedBatch, PaddedBatch, SplitBatch, TreeBatch
from replaydb.batch.columns import UNKNOWN_VERSION
from replaydb.domain import checks
from replaydb.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


def token_ratios(logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Return `exp(logprob - behaviour logprob)` of each token; 1 outside the mask.

    The ratio of PPO (Schulman et al., 2017), relative to the policy that sampled the tokens,
    however many versions old it is. Gradients flow through `logprobs`.

    Args:
        logprobs: Logprobs under the policy being trained, [A, B].
        behaviour: Logprobs under the policy that sampled the tokens, [A, B].
        mask: Tokens to include, bool [A, B], such as `loss_mask`.

    Returns:
        Ratios, [A, B].

    Raises:
        InvalidInputError: Shapes differ, or a token of the mask has no finite behaviour logprob
            (NaN: not recorded).
    """
    return _log_ratios(logprobs, behaviour, mask).exp()


def sequence_ratios(
    logprobs: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequence_index: Tensor | None = None,
) -> Tensor:
    """Return the geometric mean of the token ratios of each sequence, at each of its tokens.

    `exp(mean(logprob - behaviour logprob))` over the masked tokens: the sequence likelihood ratio
    of GSPO (Zheng et al., 2025, Group Sequence Policy Optimization, equation 7).

    Args:
        logprobs: See `token_ratios`.
        behaviour: See `token_ratios`.
        mask: See `token_ratios`.
        sequence_index: Index of the sequence of each token, -1 for padding, [A, B], as in
            `PackedBatch`; by default each row is one sequence.

    Returns:
        Ratios, [A, B]; 1 in padding, and in sequences without tokens in the mask.

    Raises:
        InvalidInputError: As for `token_ratios`.
    """
    import torch

    logs = _log_ratios(logprobs, behaviour, mask)
    if sequence_index is None:
        rows = torch.arange(len(mask), device=mask.device)
        sequence_index = rows[:, None].expand(mask.shape)
    count = int(sequence_index.max()) + 1 if sequence_index.numel() else 0
    index = torch.where(sequence_index < 0, count, sequence_index)
    sums = logs.new_zeros(count + 1).index_add(0, index.flatten(), logs.flatten())
    sizes = logs.new_zeros(count + 1).index_add(0, index.flatten(), mask.flatten().to(logs.dtype))
    return (sums / sizes.clamp(min=1)).exp()[index]


def truncated(ratios: Tensor, cap: float = 2.0) -> Tensor:
    """Return `min(ratio, cap)`, detached, as importance weights.

    Truncated importance sampling (Ionides, 2008; the c-bar of IMPALA, Espeholt et al., 2018; Yao
    et al., 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training).

    Args:
        ratios: Ratios of tokens or sequences.
        cap: Maximum weight, above 0.

    Returns:
        Weights, in the shape of `ratios`.

    Raises:
        InvalidInputError: `cap` is not a positive number.
    """
    return ratios.detach().clamp(max=checks.number("cap", cap, above=0.0))


def clipped(ratios: Tensor, low: float = 0.2, high: float | None = None) -> Tensor:
    """Return `clip(ratio, 1 - low, 1 + high)` of PPO (Schulman et al., 2017), with gradients.

    Args:
        ratios: Ratios of tokens or sequences.
        low: Clip range below 1, at least 0.
        high: Clip range above 1, at least 0; by default `low`. A larger one is the "clip-higher"
            of DAPO (Yu et al., 2025).

    Returns:
        Clipped ratios, in the shape of `ratios`.

    Raises:
        InvalidInputError: `low` or `high` is negative or not a number.
    """
    return ratios.clamp(*_range(low, high))


def fresh_tokens(
    batch: PaddedBatch | PackedBatch | SplitBatch | TreeBatch,
    version: int,
    max_token_staleness: int,
) -> Tensor:
    """Return the loss mask without tokens that are too stale or of unknown version.

    An episode that was interrupted and resumed has tokens of several policy versions. This mask
    keeps only its fresh tokens in the loss.

    Args:
        batch: The batch.
        version: The policy version being trained, from 0 to 2**31 - 1.
        max_token_staleness: Maximum number of versions that a token may be behind.

    Returns:
        Mask, bool, in the shape of `batch.loss_mask`.

    Raises:
        InvalidInputError: A number is invalid.
    """
    now = checks.policy_version("version", version)
    limit = checks.whole_number("max_token_staleness", max_token_staleness)
    return batch.loss_mask & (now - _versions(batch) <= limit)


def off_policyness(
    logprobs: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.2,
    high: float | None = None,
) -> dict[str, float]:
    """Return statistics of how off-policy a step is, for a logger.

    Args:
        logprobs: See `token_ratios`.
        behaviour: See `token_ratios`.
        mask: See `token_ratios`.
        low: Clip range below 1; ratios outside the range count as clipped.
        high: Clip range above 1; by default `low`.

    Returns:
        Over the tokens in the mask: `ratio/mean`, `ratio/min`, `ratio/max`; `ratio/clipped`, the
        fraction outside `1 - low .. 1 + high`; `ratio/ess`, the effective sample size as a fraction
        (Kish, 1965: `(sum w)^2 / (n sum w^2)`, 1 on-policy); `kl/k1` and `kl/k3`, the estimators
        `-log r` and `r - 1 - log r` of KL(behaviour, policy) (Schulman, 2020, Approximating KL
        Divergence). Empty if the mask has no tokens.

    Raises:
        InvalidInputError: As for `token_ratios`.
    """
    logs = _log_ratios(logprobs.detach(), behaviour, mask)[mask].double()
    if not logs.numel():
        return {}
    ratios = logs.exp()
    lowest, highest = _range(low, high)
    outside = (ratios < lowest) | (ratios > highest)
    # In log space, as squares of large ratios are infinite.
    ess = (2.0 * logs.logsumexp(0) - (2.0 * logs).logsumexp(0)).exp() / logs.numel()
    found = {
        "ratio/mean": ratios.mean(),
        "ratio/min": ratios.min(),
        "ratio/max": ratios.max(),
        "ratio/clipped": outside.double().mean(),
        "ratio/ess": ess,
        "kl/k1": -logs.mean(),
        "kl/k3": (ratios - 1.0 - logs).mean(),
    }
    return {name: float(value) for name, value in found.items()}


def _range(low: float, high: float | None) -> tuple[float, float]:
    """Return the range in which ratios are not clipped."""
    below = checks.number("low", low, least=0.0)
    above = below if high is None else checks.number("high", high, least=0.0)
    return 1.0 - below, 1.0 + above


def _log_ratios(logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    import torch

    if not logprobs.shape == behaviour.shape == mask.shape:
        shapes = f"{list(logprobs.shape)}, {list(behaviour.shape)}, {list(mask.shape)}"
        raise InvalidInputError("logprobs, behaviour, mask", "one shape", shapes)
    if bool((~behaviour.isfinite() & mask).any()):
        raise InvalidInputError(
            "behaviour", "a logprob for every token in the mask", "NaN (not recorded) or infinity"
        )
    # `where` before the subtraction: NaN outside the mask must not reach the gradient.
    wanted = torch.where(mask, logprobs, 0.0)
    return wanted - torch.where(mask, behaviour, 0.0)


def _versions(batch: PaddedBatch | PackedBatch | SplitBatch | TreeBatch) -> Tensor:
    """Return the policy version of each token in the loss."""
    import torch

    versions = batch.token_versions
    if versions is None:
        versions = batch.per_token(batch.policy_versions)
    return torch.where(batch.loss_mask, versions, UNKNOWN_VERSION)
