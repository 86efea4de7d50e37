"""One sample's life: checked, given a slot, submitted, and turned into a Completion when it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from sglrollout.config import Sampling
from sglrollout.engine.protocol import Request
from sglrollout.errors import ConfigError, EngineDiedError, RequestTimeoutError
from sglrollout.pool.dispatcher import Lease
from sglrollout.pool.pool import Member, Pool
from sglrollout.text import Tokenizer, check_token_ids
from sglrollout.types import Completion, Prompt, Timings, VersionSpan
from sglrollout.wire.messages import EngineInfo, Finish


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked prompt. ``room`` is how many tokens the context has left for a completion."""

    prompt: Prompt
    ids: tuple[int, ...]
    room: int


class Sample:
    """A request and the slot it holds. Whatever ends it, frees the slot.

    ``prior`` is what an earlier request sampled of the same completion; this one goes on after it.
    """

    __slots__ = ("_lease", "_timer", "index", "on_end", "prior", "request")

    def __init__(self, request: Request, index: int, prior: Completion | None = None) -> None:
        self.request, self.index, self.prior = request, index, prior
        self.on_end: Callable[[Sample], None] | None = None
        self._lease: Lease[Member] | None = None
        self._timer: asyncio.TimerHandle | None = None
        request.on_end = self._ended

    @property
    def engine(self) -> str:
        return self.request.engine

    def cancel(self, message: str = "cancelled by the caller", error: Exception | None = None) -> None:
        """Abort it in its engine and free its slot, now. Does nothing once it has ended."""
        if self.request.ended:
            return
        if self._lease is not None:
            self._lease.target.engine.abort(self.request)
        self.request.end(Finish("abort" if error is None else "error", message=message), error)

    async def until_ended(self) -> None:
        """Wait for its end, and not for each of its tokens."""
        if self.request.ended:
            return
        ended = asyncio.get_running_loop().create_future()
        on_end = self.on_end

        def note(sample: Sample) -> None:
            if not ended.done():
                ended.set_result(None)
            if on_end is not None:
                on_end(sample)

        self.on_end = note
        await ended

    def hold(self, lease: Lease[Member], deadline: float | None) -> None:
        self._lease = lease
        self.request.engine = lease.target.name
        if deadline is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        message = (
            f"not finished by its deadline, {time.monotonic() - self.request.created_s:.3g} s after it was asked for"
        )
        self.cancel(message, RequestTimeoutError(message))

    def _ended(self, request: Request) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._lease is not None:
            self._lease.release()
        if self.on_end is not None:
            self.on_end(self)


class Sampler:
    """Makes samples of one pool.

    Args:
        pool: started.
        tokenizer: ``None`` when engines run without one; then prompts are token ids and there is no text.
        info: of the pool's engines, which are all alike.
    """

    def __init__(self, pool: Pool, tokenizer: Tokenizer | None, info: EngineInfo) -> None:
        self.pool, self.tokenizer, self.info = pool, tokenizer, info

    def prepare(self, prompt: Prompt, field: str) -> Prepared:
        """Check one prompt and turn it into token ids.

        Raises:
            ConfigError: of ``field``.
        """
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(prompt, field)
        elif isinstance(prompt, str):
            raise ConfigError(field, prompt, "must be token ids, as the engines run with skip_tokenizer_init")
        else:
            ids = check_token_ids(prompt, field)
        if not ids:
            raise ConfigError(field, prompt, "must have at least one token")
        outside = next((token for token in ids if not 0 <= token < self.info.vocab_size), None)
        if outside is not None:
            raise ConfigError(field, outside, f"must hold token ids from 0 to {self.info.vocab_size - 1}")
        return Prepared(prompt, tuple(ids), self.room(len(ids)))

    def room(self, num_prompt_tokens: int) -> int:
        """Tokens that the context has left after a prompt of so many; 0 also for one that SGLang refuses."""
        if num_prompt_tokens >= self.info.max_prompt_tokens:
            return 0
        return min(self.info.context_length, self.info.max_total_tokens) - num_prompt_tokens

    def check(self, sampling: Sampling) -> None:
        """Refuse sampling options that these engines would ignore or cannot serve.

        Raises:
            ConfigError: of ``sampling.<field>``.
        """
        if sampling.seed is not None and not self.info.deterministic:
            rule = "takes effect only with RolloutConfig(deterministic=True)"
            raise ConfigError("sampling.seed", sampling.seed, rule)
        if sampling.lora is not None and not self.info.lora:
            rule = "needs engines with LoRA, which SGLang would ignore otherwise: give engine_args lora_paths"
            raise ConfigError("sampling.lora", sampling.lora, rule)
        for name in ("stop", "json_schema", "regex", "ebnf"):
            if getattr(sampling, name) and not self.info.has_tokenizer:
                raise ConfigError(
                    f"sampling.{name}", getattr(sampling, name), "needs a tokenizer in the engine (skip_tokenizer_init)"
                )
        for name in ("stop_token_ids", "logit_bias"):
            outside = [token for token in getattr(sampling, name) or () if token >= self.info.vocab_size]
            if outside:
                rule = f"must hold token ids below the vocabulary's size, {self.info.vocab_size}"
                raise ConfigError(f"sampling.{name}", outside[0], rule)

    async def start(
        self,
        prepared: Prepared,
        sampling: Sampling,
        *,
        index: int = 0,
        key: Hashable | None = None,
        chunk_tokens: int = 0,
        timeout_s: float | None = None,
        on_end: Callable[[Sample], None] | None = None,
        prior: Completion | None = None,
    ) -> Sample:
        """Wait for a slot and hand one sample to an engine. One whose deadline passes first is returned as ended.

        Args:
            prior: go on after its tokens, as if they had just been sampled; see :func:`resumable`.

        Raises:
            QueueFullError, NoEngineError: it never reached an engine.
        """
        ids, room = prepared.ids, prepared.room
        if prior is not None:
            ids = ids + prior.token_ids
            room = min(room, sampling.max_new_tokens) - len(prior.token_ids)
            sampling = _rest(sampling, len(prior.token_ids))
        request = Request(ids, self._wire(sampling, room, index), chunk_tokens)
        sample = Sample(request, index, prior)
        sample.on_end = on_end
        if room <= 0:
            request.end(Finish("length", message="the prompt leaves no room in the context"))
            return sample
        deadline = None if timeout_s is None else request.created_s + timeout_s
        try:
            while not await self._submit(sample, key, deadline):
                pass
        except RequestTimeoutError as error:
            sample.cancel(str(error), error)
        except BaseException:
            sample.cancel()
            raise
        return sample

    async def _submit(self, sample: Sample, key: Hashable | None, deadline: float | None) -> bool:
        """One try; ``False`` when the engine turned out to be dead before it had the sample."""
        lease = await self.pool.dispatcher.acquire(key, deadline)
        sample.request.queue_s = time.monotonic() - sample.request.created_s
        sample.hold(lease, deadline)
        try:
            await lease.target.engine.submit(sample.request)
        except EngineDiedError:
            lease.release()
            return sample.request.ended
        return True

    def _wire(self, sampling: Sampling, room: int, index: int) -> dict[str, Any]:
        wire = sampling.wire()
        wire["max_new_tokens"] = min(sampling.max_new_tokens, max(room, 1))
        if sampling.min_new_tokens > room:
            wire["min_new_tokens"] = max(room, 0)
        if self.info.deterministic:
            # SGLang gives every unseeded request the same seed, so that a group's samples would all be equal.
            wire["seed"] = (random.getrandbits(31) if sampling.seed is None else sampling.seed) + index
        return wire

    def completion(self, sample: Sample, prepared: Prepared, sampling: Sampling) -> Completion:
        """What became of a sample; of one that still runs, what there is of it, as if it had been aborted now."""
        request = sample.request
        finish = request.finish or Finish("abort", message="it has not ended")
        detokenize = None
        if self.tokenizer is not None:
            tokenizer, skip = self.tokenizer, sampling.skip_special_tokens

            def detokenize(completion: Completion) -> str:
                return tokenizer.completion_text(completion, skip)

        first, last = request.first_token_s, request.finished_s or time.monotonic()
        completion = Completion(
            prompt_ids=prepared.ids,
            token_ids=tuple(request.token_ids),
            logprobs=None if request.logprobs is None else tuple(request.logprobs),
            finish_reason=finish.reason,  # type: ignore[arg-type]
            stop_match=finish.stop_match,
            weight_versions=request.spans,
            cached_tokens=finish.cached_tokens,
            engine=sample.engine,
            timings=Timings(
                queue_s=request.queue_s,
                first_token_s=None if first is None else first - request.created_s,
                total_s=last - request.created_s,
            ),
            error=request.error,
            index=sample.index,
            _detokenize=detokenize,
        )
        return completion if sample.prior is None else joined(sample.prior, completion)


def resumable(sampling: Sampling) -> bool:
    """Whether a cut completion can be resumed from its tokens and be distributed as if it had not been cut.

    An engine takes those tokens for a part of the prompt. Grammars would start over, penalties would not count them,
    and a stop string that straddles the cut would not be seen.
    """
    grammar = sampling.json_schema or sampling.regex or sampling.ebnf
    penalized = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0
    return not (grammar or penalized or sampling.stop)


def joined(prior: Completion, rest: Completion) -> Completion:
    """One completion of a cut one's tokens and of those that came after; all else is that of ``rest``."""
    offset = len(prior.token_ids)
    moved = tuple(VersionSpan(span.version, span.start + offset, span.end + offset) for span in rest.weight_versions)
    spans = prior.weight_versions + moved
    if prior.weight_versions and moved and prior.weight_versions[-1].version == moved[0].version:
        bridge = VersionSpan(moved[0].version, prior.weight_versions[-1].start, moved[0].end)
        spans = (*prior.weight_versions[:-1], bridge, *moved[1:])
    logprobs = None
    if prior.logprobs is not None and rest.logprobs is not None:
        logprobs = prior.logprobs + rest.logprobs
    return dataclasses.replace(
        rest, token_ids=prior.token_ids + rest.token_ids, logprobs=logprobs, weight_versions=spans
    )


def _rest(sampling: Sampling, num_sampled: int) -> Sampling:
    """What is left of ``sampling`` after so many tokens."""
    most = max(1, sampling.max_new_tokens - num_sampled)
    least = min(most, max(0, sampling.min_new_tokens - num_sampled))
    return sampling.replace(max_new_tokens=most, min_new_tokens=least)
