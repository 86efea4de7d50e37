"""Real SGLang on the CPU: engines have the trainer's weights after a sync, whole or not at all."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import psutil
import pytest

import sglrollout as sr
from sglrollout import testing
from sglrollout.weights.transfer import Transfer
from tests.midway import TooLateError, again_if_too_late, refuse_if_too_late, until_running
from tests.reference import GREEDY, PROMPTS, answers_like, greedy, trained

pytestmark = pytest.mark.slow

LONG = sr.Sampling(max_new_tokens=1500, ignore_eos=True)
BUCKET_BYTES = 1 << 15


def logprobs(model: Any, completion: sr.Completion) -> list[float]:
    """Of each token of a completion, teacher-forced."""
    import torch

    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    first = len(completion.prompt_ids) - 1
    return [float(scores[first + i, token]) for i, token in enumerate(completion.token_ids)]


@pytest.fixture(scope="module")
async def rollout(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Two engines of this module's own: their weights change."""
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=2, device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture
def steps() -> int:
    """A number that no other test has."""
    steps_taken.append(len(steps_taken))
    return 100 + len(steps_taken)


steps_taken: list[int] = []


# ------------------------------------------------------------ the right weights


@pytest.mark.parametrize("method", ["fast", "portable"])
async def test_engines_answer_like_the_trainer_after_a_sync_and_not_before(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, method: Literal["fast", "portable"], steps: int
) -> None:
    model = trained(tiny_model, steps)
    assert not await answers_like(rollout, model)
    version = rollout.weight_version
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), method=method, bucket_bytes=BUCKET_BYTES) as syncer:
        report = await syncer.sync()
        assert await answers_like(rollout, model)
        assert (report.method, report.num_engines, report.version) == (method, 2, version + 1)
        assert rollout.weight_version == version + 1
        assert str(report.version) in str(report)
        assert report.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert report.total_s >= report.transfer_s >= report.load_s > 0
        verified = await syncer.verify()
        assert (verified.num_weights, verified.num_engines) == (report.num_tensors, 2)
        assert verified.num_bytes == 2 * report.num_bytes


async def test_every_later_sync_brings_the_weights_of_its_time(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    import torch

    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.03)
            with pytest.raises(sr.WeightMismatchError, match="embed_tokens"):
                await syncer.verify()
            report = await syncer.sync()
            assert report.plan_s == 0
            await syncer.verify()
            assert await answers_like(rollout, model)


async def test_whatever_the_staging_buffer_held_before_every_byte_of_it_that_is_read_was_written(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        assert syncer._plan is not None
        assert isinstance(syncer._plan.fast, Transfer)
        syncer._plan.fast.staging.bytes.fill_(0xFF)  # NaN, in any floating type
        await syncer.sync()
        await syncer.verify()
        assert await answers_like(rollout, model)


async def test_weights_are_cast_to_the_dtype_of_the_engine(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    import torch

    model = trained(tiny_model, steps).to(torch.bfloat16)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        report = await syncer.sync()
        assert report.num_bytes == 2 * sum(parameter.nbytes for parameter in model.parameters())
        await syncer.verify()
    assert await answers_like(rollout, model.to(torch.float32))


async def test_tensors_can_come_from_anywhere_under_their_checkpoint_names(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for source in (state, list(state.items()), lambda: iter(state.items())):
        async with sr.WeightSyncer(rollout, sr.TensorSource(source), bucket_bytes=BUCKET_BYTES) as syncer:
            await syncer.sync()
            await syncer.verify()
    assert await answers_like(rollout, model)


async def test_names_and_tensors_can_be_changed_on_the_way(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    import torch

    model = trained(tiny_model, steps)
    wrapped = torch.nn.ModuleDict({"actor": model, "critic": torch.nn.Linear(4, 4)})

    def rename(name: str) -> str | None:
        return name.removeprefix("actor.") if name.startswith("actor.") else None

    def halve_norms(name: str, tensor: Any) -> list[tuple[str, Any]]:
        return [(name, tensor * 0.5 if "norm" in name else tensor)]

    async with sr.WeightSyncer(rollout, sr.ModuleSource(wrapped, rename=rename), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        assert await answers_like(rollout, model)
    source = sr.ModuleSource(wrapped, rename=rename, transform=halve_norms)
    async with sr.WeightSyncer(rollout, source, bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        await syncer.verify()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.5 if "norm" in name else 1)
        assert await answers_like(rollout, model)


async def test_a_model_that_changed_its_tensors_is_planned_for_anew(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    import torch

    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        model.to(torch.bfloat16)
        assert (await syncer.sync()).plan_s > 0
        await syncer.verify()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # no longer tied
        with pytest.raises(sr.WeightNamesError, match=r"unexpected \(1\): lm_head.weight"):
            await syncer.sync()


# ------------------------------------------------------------ names that do not fit


async def test_names_that_do_not_fit_are_refused_before_anything_is_sent(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    import torch

    model = trained(tiny_model, steps)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    current = await rollout.generate(PROMPTS, sampling=GREEDY)
    del state["model.layers.0.self_attn.k_proj.weight"], state["model.layers.1.mlp.down_proj.weight"]
    state["model.layers.7.mlp.down_proj.weight"] = torch.zeros(3, 3)
    state["model.norm.weight"] = torch.zeros(65)
    syncer = sr.WeightSyncer(rollout, sr.TensorSource(state))
    with pytest.raises(sr.WeightNamesError) as caught:
        await syncer.sync()
    assert any(name.startswith("model.norm.weight [65]") for name in caught.value.mismatched)

    state["model.norm.weight"] = torch.zeros(64)
    with pytest.raises(sr.WeightNamesError) as caught:
        await syncer.sync()
    assert caught.value.unexpected == ("model.layers.7.mlp.down_proj.weight",)
    assert set(caught.value.missing) == {
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }
    assert [engine.state for engine in rollout.engines] == ["ready", "ready"]
    again = await rollout.generate(PROMPTS, sampling=GREEDY)
    assert [g.completions[0].token_ids for g in again] == [g.completions[0].token_ids for g in current]
    await syncer.close()


async def test_a_name_given_twice_is_refused(rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int) -> None:
    pairs = [(name, parameter.detach()) for name, parameter in trained(tiny_model, steps).named_parameters()]
    async with sr.WeightSyncer(rollout, sr.TensorSource([*pairs, pairs[3]])) as syncer:
        with pytest.raises(sr.WeightNamesError) as caught:
            await syncer.sync()
        assert caught.value.duplicates == (pairs[3][0],)


async def test_parameters_may_stay_unwritten_if_that_is_said(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    state = {name: parameter.detach() for name, parameter in trained(tiny_model, steps).named_parameters()}
    del state["model.norm.weight"]
    async with sr.WeightSyncer(rollout, sr.TensorSource(state), allow_missing=["*.norm.weight"]) as syncer:
        assert (await syncer.sync()).num_tensors == len(state)


# ------------------------------------------------------------ running requests


async def start_long(rollout: sr.AsyncRolloutEngine) -> tuple[asyncio.Task[list[sr.Group]], sr.Stream]:
    """Some samples that run, one of them streamed."""
    generating = asyncio.ensure_future(rollout.generate(PROMPTS, n=2, sampling=LONG))
    stream = rollout.stream(PROMPTS[0], LONG, chunk_tokens=3)
    await anext(stream)
    await until_running(rollout, 5)
    return generating, stream


def check_spans(completion: sr.Completion, versions: list[int]) -> tuple[int, int]:
    """Its tokens are of these versions, one after the other; where the second begins, and the end."""
    assert [span.version for span in completion.weight_versions] == versions
    starts = [span.start for span in completion.weight_versions]
    ends = [span.end for span in completion.weight_versions]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == len(completion.token_ids)
    return ends[0], ends[-1]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@again_if_too_late
async def test_running_samples_go_on_and_know_which_tokens_are_of_which_weights(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int, mode: Literal["retract", "in_place"]
) -> None:
    old, new = trained(tiny_model, steps), trained(tiny_model, steps + 1000)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(old), bucket_bytes=BUCKET_BYTES) as syncer:
        before = (await syncer.sync()).version
    async with sr.WeightSyncer(rollout, sr.ModuleSource(new), bucket_bytes=BUCKET_BYTES) as syncer:
        generating, stream = await start_long(rollout)
        report = await syncer.sync(mode=mode)
        refuse_if_too_late(generating, report)
        assert [engine.state for engine in rollout.engines] == ["ready", "ready"]
        async for chunk in stream:
            assert chunk.weight_version in (before, report.version)
        completions = [completion for group in await generating for completion in group.completions]
    for completion in [*completions, stream.completion]:
        assert completion.finish_reason == "length"
        cut, end = check_spans(completion, [before, report.version])
        assert completion.logprobs is not None
        by_old, by_new = logprobs(old, completion), logprobs(new, completion)
        assert completion.logprobs[:cut] == pytest.approx(by_old[:cut], abs=1e-3)
        assert completion.logprobs[cut] != pytest.approx(by_old[cut], abs=1e-3)
        if mode == "retract":  # its KV cache was made anew, by the new weights
            assert completion.logprobs[cut:end] == pytest.approx(by_new[cut:end], abs=1e-3)


@again_if_too_late
async def test_running_samples_end_with_what_they_have_when_a_sync_aborts_them(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    old = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(old), bucket_bytes=BUCKET_BYTES) as syncer:
        before = (await syncer.sync()).version
        generating, stream = await start_long(rollout)
        report = await syncer.sync(mode="abort")
        async for _ in stream:
            pass
        completions = [completion for group in await generating for completion in group.completions]
    if all(completion.finish_reason == "length" for completion in completions):
        raise TooLateError(report)
    for completion in [*completions, stream.completion]:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < 1500
        check_spans(completion, [before])
        assert completion.logprobs == pytest.approx(logprobs(old, completion), abs=1e-3)


async def test_samples_asked_for_during_a_sync_wait_and_get_the_new_weights(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        syncing = asyncio.ensure_future(syncer.sync())
        while not any(engine.state == "held" for engine in rollout.engines):
            await anyio.lowlevel.checkpoint()
        groups = await rollout.generate(PROMPTS, sampling=GREEDY)
        report = await syncing
    assert {span.version for g in groups for span in g.completions[0].weight_versions} == {report.version}


async def test_the_prefix_cache_is_empty_after_a_sync(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    prompt = "a prompt that is long enough to be found in the prefix cache " * 3
    async with sr.WeightSyncer(rollout, sr.ModuleSource(trained(tiny_model, steps))) as syncer:
        await syncer.sync()
        await rollout.generate([prompt] * 2, sampling=GREEDY)
        groups = await rollout.generate([prompt] * 2, sampling=GREEDY)
        assert any(group.completions[0].cached_tokens for group in groups)
        await syncer.sync()
        groups = await rollout.generate([prompt] * 2, sampling=GREEDY)
        assert not any(group.completions[0].cached_tokens for group in groups)


# ------------------------------------------------------------ order, failure, end


async def test_versions_only_go_up(rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int) -> None:
    latest = rollout.weight_version
    async with sr.WeightSyncer(rollout, sr.ModuleSource(trained(tiny_model, steps))) as syncer:
        assert (await syncer.sync(version=latest + 10)).version == latest + 10 == rollout.weight_version
        with pytest.raises(sr.ConfigError, match=f"version must be greater than {latest + 10}"):
            await syncer.sync(version=latest + 10)
        assert [engine.state for engine in rollout.engines] == ["ready", "ready"]
        assert (await syncer.sync()).version == latest + 11


async def test_one_sync_at_a_time(rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int) -> None:
    async with sr.WeightSyncer(rollout, sr.ModuleSource(trained(tiny_model, steps))) as syncer:
        syncing = asyncio.ensure_future(syncer.sync())
        await anyio.sleep(0.01)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(trained(tiny_model, steps))) as other:
            with pytest.raises(sr.LifecycleError, match="a weight sync is under way"):
                await other.sync()
        await syncing


async def test_a_cancelled_sync_leaves_no_half_loaded_engine_serving_and_the_next_heals(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=1 << 12) as syncer:
        await syncer.sync()
        for delay_s in (0.0, 0.004, 0.008, 0.012, 0.016, 0.02):
            with anyio.move_on_after(delay_s):
                await syncer.sync()
            states = {engine.state for engine in rollout.engines}
            assert states in ({"ready"}, {"stale"})
            if states == {"stale"}:
                with pytest.raises(sr.StaleWeightsError, match="a weight sync failed"):
                    await rollout.generate(PROMPTS, sampling=GREEDY)
            await syncer.sync()
            await syncer.verify()
    assert await answers_like(rollout, model)


async def test_a_sync_in_which_an_engine_is_killed_goes_on_without_it_and_no_sample_is_lost(
    tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    async with (
        sr.AsyncRolloutEngine(tiny_model, num_engines=2, device="cpu", dtype="float32", max_restarts=0) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=1 << 12, timeout_s=20) as syncer,
    ):
        await syncer.sync()
        generating = asyncio.ensure_future(rollout.generate(PROMPTS, n=2, sampling=LONG))
        await anyio.sleep(0.3)
        info = rollout.engines[0].info
        assert info is not None
        (scheduler, *_) = [p for p in psutil.Process(info.pid).children() if "resource_tracker" not in p.cmdline()[-1]]
        scheduler.suspend()  # so that it is sure to be in the middle
        syncing = asyncio.ensure_future(syncer.sync())
        await anyio.sleep(0.3)
        os.kill(scheduler.pid, 9)
        report = await syncing
        assert (report.version, report.num_engines, report.lost_engines) == (2, 1, ("engine-0",))
        assert [engine.state for engine in rollout.engines] == ["dead", "ready"]
        assert (await syncer.verify()).num_engines == 1
        (group,) = await rollout.generate(PROMPTS[:1], sampling=GREEDY)
        assert list(group.completions[0].token_ids) == greedy(model, group.prompt_ids)
        completions = [completion for group in await generating for completion in group.completions]
        assert {(c.finish_reason, len(c.token_ids)) for c in completions} == {("length", LONG.max_new_tokens)}


async def test_many_syncs_leave_memory_and_file_descriptors_as_they_were(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    pids = [os.getpid(), *(pid for engine in rollout.engines if engine.info for pid in engine.info.child_pids)]
    pids += [engine.info.pid for engine in rollout.engines if engine.info]
    processes = [psutil.Process(pid) for pid in pids]

    def usage() -> list[tuple[int, int, float]]:
        gc.collect()
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss / 2**20) for p in processes]

    shared = set(os.listdir("/dev/shm"))
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        for _ in range(10):
            await syncer.sync()
        before = usage()
        for _ in range(50):
            await syncer.sync()
        after = usage()
    for (fds, threads, rss), (fds_after, threads_after, rss_after) in zip(before, after, strict=True):
        assert fds_after <= fds + 1
        assert threads_after <= threads + 1
        assert rss_after < rss + 20
    assert set(os.listdir("/dev/shm")) <= shared


async def test_a_closed_syncer_leaves_nothing_and_refuses(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    syncer = sr.WeightSyncer(rollout, sr.ModuleSource(trained(tiny_model, steps)))
    await syncer.sync()
    directory = syncer._directory
    assert directory.exists()
    await syncer.close()
    await syncer.close()
    assert not directory.exists()
    with pytest.raises(sr.LifecycleError, match="closed"):
        await syncer.sync()


async def test_engines_on_a_cpu_say_that_they_cannot_sleep(rollout: sr.AsyncRolloutEngine) -> None:
    with pytest.raises(sr.LifecycleError, match="memory_saver"):
        await rollout.sleep()
    with pytest.raises(sr.LifecycleError, match="nothing is asleep"):
        await rollout.wake()
    with pytest.raises(sr.ConfigError, match="tags"):
        await rollout.sleep(["weight"])
    assert [engine.state for engine in rollout.engines] == ["ready", "ready"]


async def test_an_engine_that_is_told_to_sleep_ends_what_runs_first_and_serves_again(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    """On a CPU nothing is given back, but SGLang's scheduler goes the same way, and dies if something still runs."""
    engine = (await rollout._ready_pool()).members[0].engine
    generating, stream = await start_long(rollout)
    for tags in (["kv_cache"], ["weights"]):
        await engine.command("sleep", 20, tags=tags)
    await engine.command("wake", 20, tags=["weights", "kv_cache"])
    await engine.command("resume", 20, version=rollout.weight_version, flush=False)
    assert [status.state for status in rollout.engines] == ["ready", "ready"]
    await stream.aclose()
    reasons = {completion.finish_reason for group in await generating for completion in group.completions}
    assert reasons <= {"abort", "length"}
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        assert await answers_like(rollout, model)


async def test_an_engine_that_lost_its_plan_is_planned_for_anew(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    model = trained(tiny_model, steps)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        await (await rollout._ready_pool()).members[1].engine.command("detach_weights", 5)
        assert (await syncer.sync()).plan_s > 0
        await syncer.verify()
        assert (await syncer.sync()).plan_s == 0


async def test_two_syncers_of_one_rollout_take_turns(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, steps: int
) -> None:
    one, other = trained(tiny_model, steps), trained(tiny_model, steps + 1000)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(one), bucket_bytes=BUCKET_BYTES) as first:
        async with sr.WeightSyncer(rollout, sr.ModuleSource(other), bucket_bytes=BUCKET_BYTES) as second:
            await first.sync()
            await second.sync()
            with pytest.raises(sr.LifecycleError, match="another weight syncer"):
                await first.verify()
            assert await answers_like(rollout, other)
            await first.sync()
            await first.verify()
            assert await answers_like(rollout, one)
        await first.sync()  # the other one's end has not taken it away
        await first.verify()


async def test_tp_ranks_each_take_their_part_of_untied_weights(tmp_path: Path, steps: int) -> None:
    path = testing.tiny_model(tmp_path / "untied", tie=False, vocab_size=515)
    model = trained(path, steps)
    async with (
        sr.AsyncRolloutEngine(path, tp_size=2, device="cpu", dtype="float32") as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        assert (await syncer.sync()).method == "fast"
        await syncer.verify()
        assert await answers_like(rollout, model)
    async with (
        sr.AsyncRolloutEngine(path, tp_size=2, device="cpu", dtype="float32") as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), method="portable", bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        await syncer.sync()
        await syncer.verify()
        assert await answers_like(rollout, model)
