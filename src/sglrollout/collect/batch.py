"""Groups as the tensors that a trainer takes: padded, masked, with logprobs and weight versions at each token's place.

Names and conventions are those of NeMo RL's generation outputs: prompt and completion in one padded row, logprobs
aligned to each token's own position.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from sglrollout._options import Options
from sglrollout.collect.records import read_folder, write_folder
from sglrollout.collect.stats import CollectReport
from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.types import Completion, Group

if TYPE_CHECKING:
    from torch import Tensor

_NEVER = 2**63 - 1  # newer than any weight version

_PER_TOKEN = {"output_ids": "int64", "logprobs": "float32", "loss_mask": "float32", "weight_version": "int64"}
_PER_ROW = {
    "prompt_lengths": "int64",
    "generation_lengths": "int64",
    "unpadded_lengths": "int64",
    "truncated": "bool",
    "valid": "bool",
    "rewards": "float32",
    "group_index": "int64",
    "row_index": "int64",
}


class Padding(Options, frozen=True):
    """How rows of different lengths become one tensor."""

    id: int | None = Field(
        default=None, ge=0, description="Token id to pad with; None is the caller's pad_id, which is 0 by default."
    )
    side: Literal["right", "left"] = Field(default="right", description="Where the padding is.")
    multiple_of: int = Field(default=1, ge=1, description="Pad the width up to a multiple of this many tokens.")
    length: int | None = Field(
        default=None, ge=1, description="Pad to exactly this many tokens; None is the longest row's length, rounded up."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.length is not None and self.length % self.multiple_of:
            raise ConfigError("length", self.length, f"must be a multiple of multiple_of ({self.multiple_of})")
        return self

    def width(self, longest: int) -> int:
        """Tokens of a padded row where the longest has ``longest``."""
        return self.length or -(-max(longest, 1) // self.multiple_of) * self.multiple_of


_NO_OPTIONS = Padding()


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBatch:
    """``B`` samples as tensors, a row each, ``T`` tokens wide. :meth:`from_groups` makes one.

    A row is the prompt and then the completion. It starts at 0 with padding on the right, and ends at ``T`` with
    padding on the left. A sample that failed (``finish_reason`` is ``error``, or its reward is ``None`` where its group
    has rewards) keeps its row, so that shapes do not depend on failures, but its ``loss_mask`` is 0 throughout.

    Attributes:
        output_ids: ``[B, T]`` int64. Prompt, completion, and the padding id elsewhere.
        logprobs: ``[B, T]`` float32. Natural-log probability of each token at its own position, as the engine gave it;
            0 on prompt and padding, and on tokens that the model did not sample.
        loss_mask: ``[B, T]`` float32. 1 exactly on the tokens that the model sampled, in valid rows.
        prompt_lengths: ``[B]`` int64, tokens.
        generation_lengths: ``[B]`` int64, tokens of the completion, those that the model did not sample included.
        unpadded_lengths: ``[B]`` int64, the sum of both.
        truncated: ``[B]`` bool. The finish reason is ``length``.
        valid: ``[B]`` bool. False for a sample that failed.
        rewards: ``[B]`` float32. 0 where the row is not valid, or its group has no rewards.
        group_index: ``[B]`` int64, :attr:`Group.index`.
        weight_version: ``[B, T]`` int64. The version each token was sampled under; -1 on prompt and padding, and on
            tokens that the model did not sample.
        row_index: ``[B]`` int64. The row in the batch that :meth:`from_groups` made, however often this one was split
            or selected since: ``whole[part.row_index]`` are a part's rows of any tensor ``[B, ...]`` of the whole, and
            ``whole[part.row_index] = mine`` puts results back in order.
        groups: what the batch was made of. A part keeps all groups of the whole (the same tuple), as a group's samples
            may be spread over several parts.
        padding: how it was padded, with the ``id`` that was used.
        report: of a collected batch: what it is like, and what has happened since the one before it.
    """

    output_ids: Tensor
    logprobs: Tensor
    loss_mask: Tensor
    prompt_lengths: Tensor
    generation_lengths: Tensor
    unpadded_lengths: Tensor
    truncated: Tensor
    valid: Tensor
    rewards: Tensor
    group_index: Tensor
    weight_version: Tensor
    row_index: Tensor
    groups: tuple[Group, ...] = field(repr=False, compare=False)
    padding: Padding
    report: CollectReport | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_groups(cls, groups: Sequence[Group], *, padding: Padding = _NO_OPTIONS, pad_id: int = 0) -> RolloutBatch:
        """One row for each sample, groups and samples in their order; on the CPU.

        Args:
            padding: how to pad.
            pad_id: the model's pad id, used where ``padding.id`` is ``None``.

        Raises:
            ConfigError: of ``groups`` (none, or without a sample), ``logprobs`` (a sample came without them),
                ``padding.length`` (a row is longer), ``rewards`` (not one for each sample, or not finite).
        """
        import torch

        if padding.id is None:
            padding = padding.replace(id=pad_id)
        groups = tuple(groups)
        samples = [sample for group in groups for sample in _samples(group)]
        if not samples:
            raise ConfigError("groups", groups, "must hold at least one sample")
        longest = max(samples, key=lambda sample: sample.num_tokens)
        width = padding.width(longest.num_tokens)
        if longest.num_tokens > width:
            rule = f"must be at least {longest.num_tokens}, the length of {longest.name}"
            raise ConfigError("padding.length", width, rule)
        with torch.device("cpu"):  # whatever the trainer's default is
            tensors = {**_per_token(samples, width, padding), **_per_row(samples)}
        return cls(**tensors, groups=groups, padding=padding)

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        rows, width = self.output_ids.shape
        return f"RolloutBatch([{rows}, {width}], num_tokens={self.num_tokens}, device={str(self.output_ids.device)!r})"

    @property
    def batch_size(self) -> int:
        """Number of rows, ``B``."""
        return int(self.output_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are trained on: those with a ``loss_mask`` of 1."""
        return int((self.loss_mask > 0).sum())

    @property
    def attention_mask(self) -> Tensor:
        """``[B, T]`` bool. True on prompt and completion, False on padding."""
        return self._positions()[1]

    @property
    def position_ids(self) -> Tensor:
        """``[B, T]`` int64. Each token's place in its row, from 0; 0 on padding."""
        positions, on_text = self._positions()
        return positions * on_text

    def staleness(self, version: int) -> Tensor:
        """``[B]`` int64. How many versions before ``version`` the oldest token trained on was sampled.

        0 in a row where none is trained on, or none has a known version.
        """
        known = (self.loss_mask > 0) & (self.weight_version >= 0)
        oldest = self.weight_version.where(known, _NEVER).amin(dim=1)
        return version - oldest.where(oldest < _NEVER, version)

    def max_staleness(self, version: int) -> int:
        """The largest of :meth:`staleness`; 0 in a batch without rows."""
        return max(self.staleness(version).tolist(), default=0)

    def advantages(self, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
        """``[B]`` float32. Group-relative advantages: ``(reward - mean) / (std + eps)`` over a group's valid samples.

        0 for a sample that is not valid. The standard deviation is the unbiased one (``n - 1``), as in ``torch.std``
        and TRL's ``GRPOTrainer``; of a single sample it is 0. A part of a batch has them as long as it has whole
        groups; else take the whole's: ``batch.advantages()[part.row_index]``.

        Args:
            normalize: divide by the standard deviation, as GRPO does (DeepSeekMath, arXiv 2402.03300). Dr. GRPO
                (arXiv 2503.20783) does not.
            eps: added to the standard deviation.

        Raises:
            ConfigError: of ``eps``.
            LifecycleError: the batch has some rows of a group and not the others, or has one twice.
        """
        import torch

        if not eps > 0:
            raise ConfigError("eps", eps, "must be greater than 0")
        group, sums = self._whole_groups(), torch.zeros(len(self.groups), dtype=torch.float64, device=self.valid.device)
        num_valid = sums.index_add(0, group, self.valid.double())
        mean = sums.index_add(0, group, self.rewards.double() * self.valid) / num_valid.clamp(min=1)
        centered = (self.rewards - mean[group]) * self.valid
        if not normalize:
            return centered.float()
        variance = sums.index_add(0, group, centered.square()) / (num_valid - 1).clamp(min=1)
        return (centered / (variance.sqrt()[group] + eps)).float()

    def split(self, dp_size: int) -> list[RolloutBatch]:
        """Parts for the ranks of a data-parallel group: as many rows each, and about as many tokens.

        Rows are dealt from the longest to the shortest, ``dp_size`` at a time, the longest of a round to the rank with
        the fewest tokens. So a round either narrows the difference between two ranks or makes it at most that of the
        two rows they got: it never exceeds the longest row. Within a part, rows keep their order.

        Each part is as wide as its own longest row needs, or ``padding.length``.

        Raises:
            ConfigError: of ``dp_size``: it does not divide the number of rows.
        """
        if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError("dp_size", dp_size, "must be an integer of at least 1")
        if self.batch_size % dp_size:
            raise ConfigError("dp_size", dp_size, f"must divide the number of rows ({self.batch_size})")
        return [self.select(sorted(rows)) for rows in _dealt(self.unpadded_lengths.tolist(), dp_size)]

    def select(self, rows: Sequence[int] | Tensor) -> RolloutBatch:
        """The rows at these places, in this order, as wide as their longest needs (or ``padding.length``).

        Args:
            rows: places from 0 to ``B - 1``, or a mask of ``B`` booleans, such as ``batch.valid``.

        Raises:
            ConfigError: of ``rows``.
        """
        index = self._index(rows)
        longest = max(self.unpadded_lengths[index].tolist(), default=0)
        start, end = 0, self.padding.width(longest)
        if self.padding.side == "left":
            start, end = self.output_ids.shape[1] - end, self.output_ids.shape[1]
        per_token = {name: getattr(self, name)[index, start:end].contiguous() for name in _PER_TOKEN}
        return dataclasses.replace(self, **per_token, **{name: getattr(self, name)[index] for name in _PER_ROW})

    def to(self, device: Any, non_blocking: bool = False) -> RolloutBatch:
        """The same batch with its tensors on ``device``."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **moved)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the batch as a folder: ``batch.safetensors``, and ``groups.jsonl`` with a line for each group.

        It is written beside ``folder`` and renamed, so that ``folder`` is either whole or not there.

        Raises:
            ConfigError: of ``folder`` (it has something in it, or is a file), or of a group's ``prompt`` or ``data``
                (not made of JSON values).
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()}
        write_folder(folder, self.groups, tensors, {"padding": self.padding.model_dump_json()})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RolloutBatch:
        """The batch that :meth:`save` wrote there; on the CPU. See :func:`group_from_record` for what groups lose.

        Raises:
            ConfigError: of ``folder``: it is missing, damaged, or of another version of the format.
        """
        groups, tensors, metadata = read_folder(folder)
        try:
            _check(tensors, sum(len(group.completions) for group in groups))
            return cls(**tensors, groups=groups, padding=Padding(**json.loads(metadata["padding"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("folder", str(folder), f"must hold a whole saved batch ({error})") from None

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*_PER_TOKEN, *_PER_ROW)}

    def _positions(self) -> tuple[Tensor, Tensor]:
        """``[B, T]`` twice: each place counted from its row's first token, and whether it holds one."""
        import torch

        width = self.output_ids.shape[1]
        lengths = self.unpadded_lengths[:, None]
        positions = torch.arange(width, device=lengths.device)[None, :] - (
            width - lengths if self.padding.side == "left" else torch.zeros_like(lengths)
        )
        return positions, (positions >= 0) & (positions < lengths)

    def _whole_groups(self) -> Tensor:
        """``[B]`` int64. Each row's place in ``groups``: two groups of one index are still two."""
        import torch

        sizes = torch.tensor([len(group.completions) for group in self.groups], device=self.row_index.device)
        group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)[self.row_index]
        found = torch.bincount(group, minlength=len(sizes))
        if ((found > 0) & (found != sizes)).any() or len(self.row_index.unique()) != len(self):
            raise LifecycleError(
                "this part of a batch has not exactly the samples of its groups: take the whole batch's advantages, "
                "and of those batch.advantages()[part.row_index]"
            )
        return group

    def _index(self, rows: Sequence[int] | Tensor) -> Tensor:
        import torch

        index = torch.as_tensor(rows, device=self.output_ids.device)
        if index.dtype == torch.bool and index.shape == (len(self),):
            return index.nonzero()[:, 0]
        integers = not (index.is_floating_point() or index.dtype == torch.bool) or not index.numel()
        if not integers or index.dim() != 1 or not all(0 <= row < len(self) for row in index.tolist()):
            raise ConfigError(
                "rows", rows, f"must be rows from 0 to {len(self) - 1}, or a mask of {len(self)} booleans"
            )
        return index.long()


class _Sample(NamedTuple):
    """A completion as a row; ``reward`` is ``None`` where there is none."""

    group: Group
    completion: Completion
    reward: float | None

    @property
    def name(self) -> str:
        return f"sample {self.completion.index} of group {self.group.index}"

    @property
    def num_tokens(self) -> int:
        return len(self.completion.prompt_ids) + len(self.completion.token_ids)

    @property
    def valid(self) -> bool:
        return self.completion.finish_reason != "error" and (self.group.rewards is None or self.reward is not None)


def _samples(group: Group) -> list[_Sample]:
    """A group's samples, checked."""
    rewards = (None,) * len(group.completions) if group.rewards is None else group.rewards
    if len(rewards) != len(group.completions):
        rule = f"must be one for each of the {len(group.completions)} samples of group {group.index}"
        raise ConfigError("rewards", rewards, rule)
    samples = [_Sample(group, *pair) for pair in zip(group.completions, rewards, strict=True)]
    for sample in samples:
        if sample.reward is not None and not math.isfinite(sample.reward):
            raise ConfigError("rewards", sample.reward, f"must be finite for {sample.name} (None: it failed)")
        if sample.valid and sample.completion.token_ids and sample.completion.logprobs is None:
            raise ConfigError("logprobs", None, "must be sampled: Sampling(logprobs=True)")
    return samples


def _per_token(samples: Sequence[_Sample], width: int, padding: Padding) -> dict[str, Tensor]:
    import torch

    shape = (len(samples), width)
    rows = {
        "output_ids": torch.full(shape, padding.id),
        "logprobs": torch.zeros(shape, dtype=torch.float32),
        "loss_mask": torch.zeros(shape, dtype=torch.float32),
        "weight_version": torch.full(shape, -1),
    }
    for i, sample in enumerate(samples):
        start = width - sample.num_tokens if padding.side == "left" else 0
        _fill(sample, **{name: tensor[i, start : start + sample.num_tokens] for name, tensor in rows.items()})
    return rows


def _fill(sample: _Sample, output_ids: Tensor, logprobs: Tensor, loss_mask: Tensor, weight_version: Tensor) -> None:
    """Write a sample into its unpadded row, ``[P + T]`` each."""
    import torch

    completion, num_prompt = sample.completion, len(sample.completion.prompt_ids)
    output_ids.copy_(torch.tensor(completion.prompt_ids + completion.token_ids, dtype=torch.int64))
    logprobs, loss_mask, weight_version = (x[num_prompt:] for x in (logprobs, loss_mask, weight_version))
    if completion.logprobs is not None:
        logprobs.copy_(torch.tensor(completion.logprobs, dtype=torch.float32))
    if sample.valid:
        loss_mask.fill_(1)
    for span in completion.weight_versions:
        weight_version[span.start : span.end] = span.version
    if completion.loss_mask is not None:
        written = torch.tensor(completion.loss_mask, dtype=torch.int64) == 0
        for tensor, blank in ((logprobs, 0), (loss_mask, 0), (weight_version, -1)):
            tensor.masked_fill_(written, blank)


def _per_row(samples: Sequence[_Sample]) -> dict[str, Tensor]:
    import torch

    completions = [sample.completion for sample in samples]
    prompt_lengths = torch.tensor([len(completion.prompt_ids) for completion in completions])
    generation_lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    rewards = [sample.reward if sample.valid and sample.reward is not None else 0.0 for sample in samples]
    return {
        "prompt_lengths": prompt_lengths,
        "generation_lengths": generation_lengths,
        "unpadded_lengths": prompt_lengths + generation_lengths,
        "truncated": torch.tensor([completion.finish_reason == "length" for completion in completions]),
        "valid": torch.tensor([sample.valid for sample in samples]),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "group_index": torch.tensor([sample.group.index for sample in samples]),
        "row_index": torch.arange(len(samples)),
    }


def _dealt(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of each rank."""
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for begin in range(0, len(by_length), num_ranks):
        by_load = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, row in zip(by_load, by_length[begin : begin + num_ranks], strict=True):
            ranks[rank].append(row)
            loads[rank] += lengths[row]
    return ranks


def _check(tensors: Mapping[str, Tensor], num_samples: int) -> None:
    """Raises ``KeyError`` or ``ValueError`` where tensors are not those of a batch of that many samples."""
    shape = tensors["output_ids"].shape
    for name, dtype in (_PER_TOKEN | _PER_ROW).items():
        expected, tensor = (shape if name in _PER_TOKEN else shape[:1]), tensors[name]
        if len(shape) != 2 or tensor.shape != expected or str(tensor.dtype) != f"torch.{dtype}":
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
    if any(not 0 <= row < num_samples for row in tensors["row_index"].tolist()):
        raise ValueError(f"there are rows of more than the {num_samples} samples")
