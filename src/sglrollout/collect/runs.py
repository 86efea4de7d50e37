"""A group on its way: from its prompt to a batch, or back to the queue."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from sglrollout.collect.records import completion_from_record, completion_to_record, json_value
from sglrollout.collect.task import Task
from sglrollout.errors import RolloutError
from sglrollout.generation.sample import Prepared
from sglrollout.types import Completion, Group


class Stage(Enum):
    """Where a group is."""

    PENDING = "pending"
    """It waits to be admitted, perhaps with tokens of an earlier try."""
    RUNNING = "running"
    """Its samples run."""
    ENDED = "ended"
    """They have ended, and are being rewarded or filtered."""
    FINISHED = "finished"
    """It waits for its batch."""
    GONE = "gone"
    """Delivered, or filtered out."""


class Slot:
    """One sample of a group.

    Attributes:
        prior: what was sampled of it before it was cut.
        completion: all of it, once it has ended.
        reward: its reward, if it got one.
        being_rewarded: its reward is asked for; it is asked for once.
        settled: it has ended, and has its reward or will not get one.
        failure: why it counts as failed.
        cancel: ends what runs for it, and gives what there is of it.
        so_far: gives what there is of it, while it runs; ``None`` if that could not be resumed.
        last_token_s: gives when it last got tokens, while it runs.
    """

    __slots__ = (
        "being_rewarded",
        "cancel",
        "completion",
        "failure",
        "last_token_s",
        "prior",
        "reward",
        "settled",
        "so_far",
    )

    def __init__(self) -> None:
        self.prior: Completion | None = None
        self.completion: Completion | None = None
        self.reward: float | None = None
        self.being_rewarded = self.settled = False
        self.failure: Exception | None = None
        self.cancel: Callable[[], Completion | None] | None = None
        self.so_far: Callable[[], Completion | None] | None = None
        self.last_token_s: Callable[[], float] | None = None

    def keep(self, held: Completion | None) -> None:
        """Of a sample that was cut: what to go on from. One that had just ended needs nothing more."""
        if held is not None and held.finish_reason in ("stop", "length"):
            self.completion = held
        else:
            self.prior = held

    def stop_following(self) -> None:
        """Nothing runs for it any more."""
        self.cancel = self.so_far = self.last_token_s = None


class GroupRun:
    """A group, its samples, and how far they are.

    Attributes:
        index: its place in the source, which is its place in line.
        attempt: counts the times it was taken back; what still comes of an earlier attempt is ignored.
        birth: the weight version of its oldest token; of its admission, before it has one.
        key: its samples go to one engine.
        seed: of its samples, where engines honour seeds.
        group: once it is finished.
    """

    __slots__ = ("attempt", "birth", "group", "index", "key", "prepared", "seed", "slots", "stage", "task")

    def __init__(self, index: int, task: Task, prepared: Prepared | None, n: int, seed: int | None) -> None:
        self.index, self.task, self.prepared, self.seed = index, task, prepared, seed
        self.slots = [Slot() for _ in range(n)]
        self.stage, self.attempt, self.birth = Stage.PENDING, 0, 0
        self.key = object() if n > 1 else None
        self.group: Group | None = None

    @property
    def sampled(self) -> bool:
        """Whether all its samples have ended."""
        return all(slot.completion is not None for slot in self.slots)

    @property
    def whole(self) -> bool:
        """Whether they are rewarded, too, as far as they can be."""
        return all(slot.settled for slot in self.slots)

    def oldest_version(self, version: int) -> int:
        """Of the tokens it has, and of those to come."""
        held = (slot.completion or slot.prior for slot in self.slots)
        spans = (span.version for completion in held if completion for span in completion.weight_versions)
        return min(spans, default=version)

    def reset(self) -> None:
        """Forget what was sampled."""
        self.slots = [Slot() for _ in self.slots]
        self.group = None

    def take_back(self, keep: bool) -> None:
        """End what runs of it, and make it pending; with its tokens, if they are to be kept."""
        for slot in self.slots:
            cancel = slot.cancel
            slot.stop_following()
            if cancel is not None:
                slot.keep(cancel())
        self.attempt += 1
        self.stage, self.group = Stage.PENDING, None
        if not keep:
            self.reset()

    # ------------------------------------------------------------ records

    def to_record(self) -> dict[str, Any]:
        """As JSON values. Of a sample that runs, what there is of it.

        Raises:
            ConfigError: the prompt or its data are not JSON values.
        """
        return {
            "index": self.index,
            "prompt": json_value(self.task.prompt, "prompt"),
            "data": json_value(self.task.data, "data"),
            "seed": self.seed,
            "samples": [_slot_record(slot) for slot in self.slots],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], prepare: Callable[[Task], Prepared | None]) -> GroupRun:
        """A pending run as it was; samples that had ended are not sampled again."""
        task = Task(record["prompt"], record["data"])
        run = cls(record["index"], task, prepare(task), len(record["samples"]), record["seed"])
        for slot, kept in zip(run.slots, record["samples"], strict=True):
            slot.prior = completion_from_record(kept["prior"]) if kept["prior"] else None
            slot.completion = completion_from_record(kept["completion"]) if kept["completion"] else None
            slot.reward, slot.settled = kept["reward"], kept["settled"]
            slot.failure = RolloutError(kept["failure"]) if kept["failure"] else None
        return run


def _slot_record(slot: Slot) -> dict[str, Any]:
    kept = Slot()
    kept.prior, kept.completion = slot.prior, slot.completion
    if slot.so_far is not None:
        kept.keep(slot.so_far())
    prior = kept.prior
    return {
        "prior": completion_to_record(prior) if prior is not None and prior.token_ids else None,
        "completion": completion_to_record(kept.completion) if kept.completion is not None else None,
        "reward": slot.reward,
        "settled": slot.settled,
        "failure": str(slot.failure) if slot.failure is not None else None,
    }
