"""Makes samples: checked, given a slot, submitted, moved on when an engine is lost, and turned into completions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from sglrollout.config import Sampling
from sglrollout.errors import (
    ConfigError,
    EngineDiedError,
    LifecycleError,
    NoEngineError,
    RequestTimeoutError,
    RolloutError,
    StaleWeightsError,
    fresh,
)
from sglrollout.generation.sample import Failover, Observer, Outlives, Prepared, Sample
from sglrollout.pool.dispatcher import Elsewhere, Lease
from sglrollout.pool.pool import Member, Pool
from sglrollout.text import Tokenizer, check_token_ids
from sglrollout.types import Completion, Prompt, Timings
from sglrollout.wire.messages import EngineInfo, Finish


class Sampler:
    """Makes samples of one pool.

    Args:
        pool: started.
        tokenizer: ``None`` when engines run without one; then prompts are token ids and there is no text.
        info: of the pool's engines, which are all alike.
        tasks: where samples whose engine was lost look for another.
        failover: of all samples.
        observer: told what becomes of them.
    """

    def __init__(
        self,
        pool: Pool,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        tasks: TaskGroup,
        failover: Failover,
        observer: Observer | None = None,
    ) -> None:
        self.pool, self.tokenizer, self.info = pool, tokenizer, info
        self._tasks, self._failover, self._observer = tasks, failover, observer

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
        if sampling.lora and not self.info.lora:
            rule = "needs engines with LoRA, as SGLang would ignore it otherwise: lora_rank, or engine_args lora_paths"
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
        outlives: Outlives = Outlives.DEATHS,
    ) -> Sample:
        """Wait for a slot and hand one sample to an engine. One whose deadline passes first is returned as ended.

        Args:
            prior: go on after its tokens, as if they had just been sampled; see :func:`resumable`.
            outlives: what it goes on after. With ``SLEEP`` it is also waited for engines that sleep now.

        Raises:
            QueueFullError, NoEngineError, LifecycleError, StaleWeightsError: it never reached an engine.
        """
        sample = Sample(
            prepared,
            sampling,
            self._wire(sampling, index),
            index=index,
            key=key,
            chunk_tokens=chunk_tokens,
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            outlives=outlives,
            failover=self._failover,
            on_lost=self._look_for_another,
            prior=prior,
            observer=self._observer,
        )
        sample.on_end = on_end
        try:
            await self._dispatch(sample)
        except RequestTimeoutError as error:
            sample.cancel(str(error), error)
        except BaseException:
            sample.cancel()
            raise
        return sample

    async def _dispatch(self, sample: Sample, first: bool = False) -> None:
        """Wait for a slot and hand it to an engine, unless there is nothing left to sample.

        Args:
            first: before all that wait, for it had a slot already.
        """
        while not sample.request.ended:
            if sample.room <= 0:
                sample.request.end(Finish("length", message="there is no room left for a token"))
                return
            lease = await self._slot(sample, first)
            if sample.request.ended:
                lease.release()
                return
            adapter = self.pool.adapter
            sample.aim(adapter.name if adapter is not None else None)
            sample.hold(lease)
            try:
                with anyio.CancelScope() as sample.handover:  # its end, or its engine's, ends this wait for the channel
                    await lease.target.engine.submit(sample.request)
                return
            except EngineDiedError:  # before it had it
                sample.let_go()

    async def _slot(self, sample: Sample, first: bool) -> Lease[Member]:
        patient = sample.outlives is Outlives.SLEEP
        while True:
            if patient:
                await self._until_open(sample)
            begun_s = time.monotonic()
            key = sample.key if sample.avoids is None else Elsewhere(sample.key, sample.avoids)
            try:
                return await self.pool.dispatcher.acquire(key, sample.deadline, first)
            except (LifecycleError, StaleWeightsError):
                if not patient or self.pool.dispatcher.closed:
                    raise
            finally:
                sample.request.queue_s += time.monotonic() - begun_s

    async def _until_open(self, sample: Sample) -> None:
        """Wait while engines sleep, which does not count against its deadline."""
        if self.pool.dispatcher.refusal is None:
            return
        begun_s = time.monotonic()
        await self.pool.until_open()
        if sample.deadline is not None:
            sample.deadline += time.monotonic() - begun_s

    # ------------------------------------------------------------ when an engine is lost

    def _look_for_another(self, sample: Sample, loss: Exception | None) -> None:
        self._tasks.start_soon(self._go_on, sample, loss)

    async def _go_on(self, sample: Sample, loss: Exception | None) -> None:
        """Give a sample to another engine. Where there is none, it fails with what it lost its engine by."""
        with anyio.CancelScope() as search:
            sample.search = search
            try:
                await self._dispatch(sample, first=True)
            except (NoEngineError, StaleWeightsError) as refusal:
                _fail(sample, loss or refusal)
            except RolloutError as refusal:
                _fail(sample, refusal)
            except BaseException:
                _fail(sample, LifecycleError("this rollout is closed"))  # unless it was its own end that cancelled this
                raise
            finally:
                if sample.search is search:  # else it lost that engine, too, before this had ended
                    sample.search = None

    def _wire(self, sampling: Sampling, index: int) -> dict[str, Any]:
        wire = sampling.wire()
        if sampling.lora == "":
            del wire["lora"]
        if self.info.deterministic:
            # SGLang gives every unseeded request the same seed, so that a group's samples would all be equal.
            wire["seed"] = (random.getrandbits(31) if sampling.seed is None else sampling.seed) + index
        return wire

    def completion(self, sample: Sample) -> Completion:
        """What became of a sample; of one that still runs, what there is of it, as if it had been aborted now."""
        request = sample.request
        finish = request.finish or Finish("abort", message="it has not ended")
        detokenize = None
        if self.tokenizer is not None:
            tokenizer, skip = self.tokenizer, sample.sampling.skip_special_tokens

            def detokenize(completion: Completion) -> str:
                return tokenizer.completion_text(completion, skip)

        first, last = request.first_token_s, request.finished_s or time.monotonic()
        return Completion(
            prompt_ids=sample.prepared.ids,
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


def _fail(sample: Sample, error: Exception) -> None:
    sample.cancel(str(error), fresh(error))
