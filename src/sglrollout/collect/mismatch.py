"""How far the trainer's logprobs are from the engine's, and weights that correct for it.

The engine samples with other kernels than the trainer computes with, and maybe with older weights, so that training is
off-policy by more than one thinks. For a token, ``r = exp(train - rollout)`` is its probability under the trainer over
that under the engine. Expectations are over tokens that the engine sampled, so means estimate
``KL(rollout || train)`` (Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from sglrollout.collect.batch import RolloutBatch
from sglrollout.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["truncated", "masked"]
Level = Literal["token", "sequence", "geometric"]

_METRICS = ("token_mult_prob_error", "kl_k1", "kl_k3", "max_abs_diff", "mean_abs_diff", "num_tokens")
_MAX_MULT_PROB_ERROR, _MAX_KL_K3 = 1.05, 1e-3  # NeMo RL's gates
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class VersionMismatch:
    """Figures over the tokens that one weight version sampled. Logprobs and differences are natural logarithms.

    Attributes:
        token_mult_prob_error: mean of ``exp(|train - rollout|)``; 1 is perfect. NeMo RL's name and definition.
        kl_k1: mean of ``k1 = -log r = rollout - train``: unbiased, positive where the engine is surer of its tokens
            than the trainer.
        kl_k3: mean of ``k3 = r - 1 - log r``: unbiased too, never negative, of less variance. NeMo RL's gen_kl_error.
        max_abs_diff: largest ``|train - rollout|``.
        mean_abs_diff: mean of ``|train - rollout|``.
        num_tokens: tokens compared.
    """

    token_mult_prob_error: float
    kl_k1: float
    kl_k3: float
    max_abs_diff: float
    mean_abs_diff: float
    num_tokens: int

    @property
    def healthy(self) -> bool:
        """Within NeMo RL's gates: ``token_mult_prob_error`` at most 1.05, and ``kl_k3`` below 1e-3."""
        return self.token_mult_prob_error <= _MAX_MULT_PROB_ERROR and self.kl_k3 < _MAX_KL_K3

    def __str__(self) -> str:
        return (
            f"mult prob error {self.token_mult_prob_error:.4f}, KL k1 {self.kl_k1:.2e}, k3 {self.kl_k3:.2e}, "
            f"|diff| mean {self.mean_abs_diff:.2e}, max {self.max_abs_diff:.2e}, {self.num_tokens} tokens"
        )


@dataclass(frozen=True)
class MismatchReport(VersionMismatch):
    """The same figures over all tokens that are trained on.

    Attributes:
        worst: row and position in ``[B, T]`` of the token with the largest ``|train - rollout|``.
        per_version: the figures of each weight version by itself, oldest first; -1 has the tokens of unknown version.
    """

    worst: tuple[int, int]
    per_version: dict[int, VersionMismatch] = field(repr=False)

    @property
    def version(self) -> int:
        """The newest weight version that the batch has tokens of."""
        return max(self.per_version)

    @property
    def healthy(self) -> bool:
        """Whether the tokens of :attr:`version` are within the gates: older ones differ by what was trained since, too.

        Where the trainer is at a later version already (the batch has no token of that), drift is in this as well.
        """
        return self.per_version[self.version].healthy

    def as_dict(self, prefix: str = "mismatch/") -> dict[str, float]:
        """The figures for a logger, ``healthy`` as 1 or 0. Those per version are left out: their names would grow."""
        figures = {name: float(getattr(self, name)) for name in _METRICS}
        return {f"{prefix}{name}": value for name, value in {**figures, "healthy": float(self.healthy)}.items()}

    def __str__(self) -> str:
        row, position = self.worst
        health = "healthy" if self.healthy else "not healthy"
        if len(self.per_version) > 1:
            health += f" under version {self.version}; of all"
        lines = [f"{health}: {super().__str__()}", f"worst at row {row}, position {position}"]
        if len(self.per_version) > 1:
            lines += [f"version {version}: {figures}" for version, figures in self.per_version.items()]
        return "\n  ".join(lines)


def mismatch(train_logprobs: Tensor, batch: RolloutBatch) -> MismatchReport:
    """Compare the trainer's logprobs with the engine's, over the tokens with a ``loss_mask`` of 1.

    Args:
        train_logprobs: ``[B, T]`` of any float type, on any device: natural-log probability of each token of
            ``batch.output_ids`` at its own position, under the sampling temperature. What is outside of the mask is
            not looked at. No gradient flows.
        batch: may be on another device.

    Raises:
        ConfigError: of ``train_logprobs`` (another shape, no floats, or not finite at a token that counts), or of
            ``batch`` (its logprobs are not finite there, or there is no such token).
    """
    rollout, train, mask = _aligned(train_logprobs, batch)
    rows, positions = mask.nonzero(as_tuple=True)
    if not len(rows):
        raise ConfigError("batch", batch, "must have tokens that the model sampled, in samples that did not fail")
    diff = (train - rollout)[rows, positions]
    versions = batch.weight_version.to(mask.device)[rows, positions]
    worst = int(diff.abs().argmax())
    return MismatchReport(
        **_figures(diff),
        worst=(int(rows[worst]), int(positions[worst])),
        per_version={
            version: VersionMismatch(**_figures(diff[versions == version])) for version in versions.unique().tolist()
        },
    )


def importance_weights(
    train_logprobs: Tensor,
    batch: RolloutBatch,
    *,
    mode: Mode = "truncated",
    level: Level = "token",
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Importance weights ``[B, T]`` float32 of what the engine sampled, to multiply the loss of each token with.

    Detached, on the device of ``train_logprobs``, and 0 outside of ``loss_mask``; a batch with no token to train on has
    zeros only. Log-ratios are clamped to -20 and 20 before they are exponentiated (after they are summed or averaged
    over a row), so that a weight is at most about 4.9e8.

    Args:
        train_logprobs: as in :func:`mismatch`.
        batch: as in :func:`mismatch`.
        mode: ``truncated``: ``min(w, cap)`` (TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You
            Off-Policy RL Training", 2025). ``masked``: ``w`` where ``low <= w <= high``, else 0 ("Small Leak
            Can Sink a Great Ship: Boost RL Training on MoE with IcePop", 2025).
        level: what ``w`` is. ``token``: each token's own ratio ``exp(train - rollout)``. For all tokens of a row alike:
            ``sequence``, the product of its ratios; ``geometric``, their geometric mean (as in GSPO, arXiv 2507.18071).
        cap: of ``truncated``.
        low: of ``masked``.
        high: of ``masked``.

    Raises:
        ConfigError: of ``mode``, ``level``, ``cap``, ``low`` or ``high``, or as :func:`mismatch`.
    """
    import torch

    _check_options(mode, level, cap, low, high)
    rollout, train, mask = _aligned(train_logprobs, batch)
    log_ratio = train - rollout
    if level != "token":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1)
    weights = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().float()
    if mode == "truncated":
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    return torch.where(mask, weights, 0.0)


def _aligned(train_logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The engine's and the trainer's logprobs, ``[B, T]`` float64 with 0 outside of the mask, and the mask, bool."""
    train = train_logprobs.detach()
    if train.shape != batch.logprobs.shape:
        rows, width = batch.logprobs.shape
        shifted = " (for the token after each position: put a column of zeros first)"
        hint = shifted if train.shape == (rows, width - 1) else ""
        raise ConfigError("train_logprobs", tuple(train.shape), f"must be [{rows}, {width}] like the batch's{hint}")
    if not train.is_floating_point():
        raise ConfigError("train_logprobs", train.dtype, "must be floats")
    mask = batch.loss_mask.to(train.device) > 0
    train = train.double().masked_fill(~mask, 0.0)
    rollout = batch.logprobs.detach().to(train.device).double().masked_fill(~mask, 0.0)
    _check_finite("train_logprobs", train)
    _check_finite("batch", rollout)
    return rollout, train, mask


def _check_finite(name: str, logprobs: Tensor) -> None:
    wrong = (~logprobs.isfinite()).nonzero().tolist()
    if wrong:
        row, position = wrong[0]
        value = float(logprobs[row, position])
        more = f" and {len(wrong) - 1} other places" if len(wrong) > 1 else ""
        rule = f"must have finite logprobs where loss_mask is 1, and has not at row {row}, position {position}{more}"
        raise ConfigError(name, value, rule)


def _figures(diff: Tensor) -> dict[str, Any]:
    """Of ``train - rollout``, ``[n]`` float64."""
    absolute = diff.abs()
    return {
        "token_mult_prob_error": float(absolute.exp().mean()),
        "kl_k1": 0.0 - float(diff.mean()),  # of no difference 0, not -0
        "kl_k3": float((diff.expm1() - diff).clamp(min=0).mean()),  # clamped: rounding can make it -1e-17
        "max_abs_diff": float(absolute.max()),
        "mean_abs_diff": float(absolute.mean()),
        "num_tokens": len(diff),
    }


def _check_options(mode: str, level: str, cap: float, low: float, high: float) -> None:
    for name, value, kinds in (("mode", mode, get_args(Mode)), ("level", level, get_args(Level))):
        if value not in kinds:
            raise ConfigError(name, value, f"must be one of {', '.join(kinds)}")
    for name, number in (("cap", cap), ("low", low), ("high", high)):
        if isinstance(number, bool) or not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise ConfigError(name, number, "must be a finite number")
    if cap <= 0:
        raise ConfigError("cap", cap, "must be greater than 0")
    if low < 0:
        raise ConfigError("low", low, "must be at least 0")
    if high <= low:
        raise ConfigError("high", high, f"must be greater than low ({low})")
