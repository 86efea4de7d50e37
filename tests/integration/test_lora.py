"""Real engines sample with a LoRA adapter that a trainer has changed, and PEFT's model says what they should say."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import sglrollout as sr
from sglrollout import testing
from tests.midway import again_if_too_late, refuse_if_too_late, until_running
from tests.reference import GREEDY, PROMPTS, answers_like, greedy, trained, untrained

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "lora_rank": 8, "restart_delay_s": 0.1}
LONG = sr.Sampling(temperature=1.0, max_new_tokens=400, ignore_eos=True)


def adapted(path: Path, seed: int, **config: Any) -> Any:
    """PEFT's model with an adapter of some training."""
    model = untrained(path)
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    adapted = get_peft_model(model, LoraConfig(**settings))
    train(adapted, seed)
    return adapted


def train(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def logprobs(model: Any, completion: sr.Completion) -> list[float]:
    """What the model thinks of each sampled token."""
    import torch

    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        scores = model(ids).logits[0].float().log_softmax(-1)
    first = len(completion.prompt_ids) - 1
    return [float(scores[first + i, token]) for i, token in enumerate(completion.token_ids)]


@pytest.fixture(scope="module")
async def rollout(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=2, **OPTIONS) as rollout:
        yield rollout


async def until(rollout: sr.AsyncRolloutEngine, *states: str) -> None:
    with anyio.fail_after(120):
        while [engine.state for engine in rollout.engines] != list(states):
            await anyio.sleep(0.02)


async def test_engines_answer_with_the_adapter_after_each_sync_and_without_it_when_told(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    model = adapted(tiny_model, 1)
    async with sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer:
        for seed in (2, 3):
            train(model, seed)
            assert not await answers_like(rollout, model)
            report = await syncer.sync()
            assert (report.method, report.num_engines) == ("lora", 2)
            assert report.num_tensors == sum(".lora_" in name for name, _ in model.named_parameters())
            assert await answers_like(rollout, model)
        await syncer.verify()
    (group,) = await rollout.generate(PROMPTS[:1], sampling=GREEDY.replace(lora=""))
    with model.disable_adapter():
        assert list(group.completions[0].token_ids) == greedy(model, group.prompt_ids)


async def test_verify_finds_an_engine_that_has_another_version(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    async with sr.WeightSyncer(rollout, sr.LoRASource(adapted(tiny_model, 20))) as syncer:
        await syncer.sync()
        pool = await rollout._ready_pool()
        async with sr.WeightSyncer(rollout, sr.LoRASource(adapted(tiny_model, 21))) as other:
            failing(pool.members[1], times=1)
            with pytest.raises(sr.WeightSyncError):
                await other.sync()
        for member in pool.members:  # as if that had gone well
            member.stale = ""
            await member.engine.command("resume", 10.0, version=pool.weight_version, flush=True)
        with pytest.raises(sr.WeightSyncError, match="engine-1"):
            await syncer.verify()
        await syncer.sync()
        await syncer.verify()


def failing(member: Any, times: int) -> None:
    """Let an engine refuse the next adapters."""
    command, left = member.engine.command, [times]

    async def refuse(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "load_adapter" and left[0]:
            left[0] -= 1
            raise sr.EngineRequestError(member.name, "it has no room")
        return await command(name, *arguments, **named)

    member.engine.command = refuse


@pytest.mark.parametrize("heals", ["an adapter", "whole weights"])
async def test_a_sync_that_reached_one_engine_only_is_healed_by_the_next_one_of_either_kind(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, heals: str
) -> None:
    model = adapted(tiny_model, 22)
    whole = adapted(tiny_model, 22).unload()
    pool = await rollout._ready_pool()
    async with (
        sr.WeightSyncer(rollout, sr.ModuleSource(whole)) as base,
        sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer,
    ):
        await base.sync()
        await syncer.sync()
        before = adapted(tiny_model, 22)
        train(model, 23)
        failing(pool.members[1], times=1)
        with pytest.raises(sr.WeightSyncError, match="no room"):
            await syncer.sync()
        assert {engine.state for engine in rollout.engines} == {"stale"}
        if heals == "an adapter":
            await syncer.sync()
            assert await answers_like(rollout, model)
        else:
            await base.sync()
            assert await answers_like(rollout, before)


async def test_a_sync_that_finds_no_engine_fails_and_one_that_comes_back_later_has_what_it_had(
    tiny_model: Path,
) -> None:
    model = adapted(tiny_model, 24)
    async with sr.AsyncRolloutEngine(tiny_model, **OPTIONS) as rollout:
        async with sr.WeightSyncer(rollout, sr.LoRASource(model), timeout_s=0.5) as syncer:
            await syncer.sync()
            info = rollout.engines[0].info
            assert info is not None
            os.kill(info.child_pids[0], signal.SIGKILL)
            await until(rollout, "restarting")
            train(model, 25)
            with pytest.raises(sr.WeightSyncError, match="no rank owns a running engine"):
                await syncer.sync()
        await until(rollout, "ready")  # from what the rollout keeps, though the syncer is closed
        assert rollout.weight_version == 1
        assert await answers_like(rollout, adapted(tiny_model, 24))


async def test_an_adapter_that_does_not_fit_fails_the_sync_and_no_engine_dies_of_it(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, tmp_path: Path
) -> None:
    other = testing.tiny_model(tmp_path / "deeper", num_layers=4)
    async with sr.WeightSyncer(rollout, sr.LoRASource(adapted(other, 26))) as syncer:
        with pytest.raises(sr.WeightSyncError):
            await syncer.sync(mode="abort")
    model = adapted(tiny_model, 27)
    async with sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer:
        await syncer.sync()
        assert await answers_like(rollout, model)


async def test_a_rollout_has_one_adapter(rollout: sr.AsyncRolloutEngine, tiny_model: Path) -> None:
    async with sr.WeightSyncer(rollout, sr.LoRASource(adapted(tiny_model, 28))) as syncer:
        await syncer.sync()
    model = adapted(tiny_model, 29)
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    async with sr.WeightSyncer(rollout, sr.LoRASource(model, "second")) as syncer:
        with pytest.raises(sr.ConfigError, match="'default'"):
            await syncer.sync()


@pytest.mark.parametrize(
    "config", [{"use_rslora": True}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}, {"r": 8}]
)
async def test_adapters_of_other_kinds_do_what_peft_does_with_them(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, config: dict[str, Any]
) -> None:
    model = adapted(tiny_model, 4, **config)
    async with sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer:
        await syncer.sync()
        assert await answers_like(rollout, model)


@again_if_too_late
async def test_running_samples_go_on_with_the_new_version_and_know_which_tokens_are_of_which(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    old, new = adapted(tiny_model, 5), adapted(tiny_model, 6)
    async with sr.WeightSyncer(rollout, sr.LoRASource(old)) as syncer:
        before = (await syncer.sync()).version
    async with sr.WeightSyncer(rollout, sr.LoRASource(new)) as syncer:
        generating = asyncio.ensure_future(rollout.generate(PROMPTS, n=2, sampling=LONG))
        await until_running(rollout, 4)
        report = await syncer.sync()
        refuse_if_too_late(generating, report)
        completions = [completion for group in await generating for completion in group.completions]
    for completion in completions:
        assert [span.version for span in completion.weight_versions] == [before, report.version]
        cut = completion.weight_versions[0].end
        assert completion.logprobs is not None
        by_old, by_new = logprobs(old, completion), logprobs(new, completion)
        assert completion.logprobs[:cut] == pytest.approx(by_old[:cut], abs=1e-3)
        assert completion.logprobs[cut:] == pytest.approx(by_new[cut:], abs=1e-3)


async def test_whole_weights_and_adapters_may_take_turns_and_a_killed_engine_comes_back_with_both(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    async def kill_one() -> None:
        info = rollout.engines[0].info
        assert info is not None
        os.kill(info.child_pids[0], signal.SIGKILL)
        await until(rollout, "restarting", "ready")
        await until(rollout, "ready", "ready")

    model = adapted(tiny_model, 7)
    async with sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer:
        await syncer.sync()
        await kill_one()
        assert await answers_like(rollout, model)

        other = trained(tiny_model, 8)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(other)) as whole:
            await whole.sync()
        weights = dict(other.named_parameters())
        import torch

        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" not in name:
                    plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
                    parameter.copy_(weights[plain])
        assert await answers_like(rollout, model)
        train(model, 9)
        await syncer.sync()
        await kill_one()
        assert await answers_like(rollout, model)


async def test_samples_without_an_adapter_are_not_given_one_in_the_middle(tiny_model: Path) -> None:
    model = adapted(tiny_model, 10)
    async with (
        sr.AsyncRolloutEngine(tiny_model, **OPTIONS) as rollout,
        sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer,
    ):
        stream = rollout.stream(PROMPTS[0], LONG, chunk_tokens=1)
        await anext(stream)
        with pytest.raises(sr.WeightSyncError, match="samples are under way without it"):
            await syncer.sync()
        assert [chunk.weight_version async for chunk in stream][-1] == 0
        stream = rollout.stream(PROMPTS[0], LONG, chunk_tokens=1)
        await anext(stream)
        await syncer.sync(mode="abort")
        assert [chunk async for chunk in stream][-1].finish_reason == "abort"
        assert await answers_like(rollout, model)


async def test_tp_ranks_have_their_parts_of_an_adapter(tmp_path: Path) -> None:
    path = testing.tiny_model(tmp_path / "untied", tie=False)
    model = adapted(path, 11)
    async with (
        sr.AsyncRolloutEngine(path, tp_size=2, **OPTIONS) as rollout,
        sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer,
    ):
        await syncer.sync()
        assert await answers_like(rollout, model)


async def test_a_server_loads_an_adapter_from_a_disk_that_it_shares(tiny_model: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model, 12)
    async with sr.launch_server(tiny_model, device="cpu", dtype="float32", lora_rank=8) as server:
        remote = [sr.RemoteEngine(server.url, api_key=server.api_key)]
        async with sr.AsyncRolloutEngine(tiny_model, num_engines=1, remote=remote, **OPTIONS) as rollout:
            async with sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer:
                with pytest.raises(sr.ConfigError, match="must be a Disk"):
                    await syncer.sync()
            async with sr.WeightSyncer(rollout, sr.LoRASource(model), remote=sr.Disk(tmp_path)) as syncer:
                for seed in (13, 14):
                    train(model, seed)
                    await syncer.sync(mode="abort")
                    assert await answers_like(rollout, model)
                stream = rollout.stream(PROMPTS[0], LONG, chunk_tokens=1)
                await anext(stream)
                with pytest.raises(sr.WeightSyncError, match="for new requests only"):
                    await syncer.sync(mode="in_place")
                await stream.aclose()
        assert len(list(tmp_path.iterdir())) == 1

        headers = {"Authorization": f"Bearer {server.api_key}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as http:
            said = await http.post("/update_weight_version", json={"new_version": "7", "abort_all_requests": False})
            assert said.status_code == 200
        again = [sr.RemoteEngine(server.url, api_key=server.api_key)]
        async with (
            sr.AsyncRolloutEngine(tiny_model, num_engines=1, remote=again, **OPTIONS) as rollout,
            sr.WeightSyncer(rollout, sr.LoRASource(model), remote=sr.Disk(tmp_path)) as syncer,
        ):
            with pytest.raises(sr.WeightSyncError, match="its base model may be wrong"):
                await syncer.sync(mode="abort")


async def test_engines_that_are_not_for_such_adapters_are_told_apart_before_anything_is_sent(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    version = rollout.weight_version
    async with sr.WeightSyncer(rollout, sr.LoRASource(adapted(tiny_model, 15, r=16))) as syncer:
        with pytest.raises(sr.ConfigError, match="must be at most 8"):
            await syncer.sync()
    assert rollout.weight_version == version
    assert [engine.state for engine in rollout.engines] == ["ready", "ready"]
    async with (
        sr.AsyncRolloutEngine(tiny_model, device="cpu", dtype="float32") as plain,
        sr.WeightSyncer(plain, sr.LoRASource(adapted(tiny_model, 16))) as syncer,
    ):
        with pytest.raises(sr.ConfigError, match="lora_rank"):
            await syncer.sync()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"use_dora": True}, "config.use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "config.rank_pattern"),
        ({"modules_to_save": ["norm"]}, "config.modules_to_save"),
        ({"target_modules": ["q_proj", "k_proj"]}, "config.target_modules"),
        ({"target_modules": ["v_proj"]}, "config.target_modules"),
        ({"target_modules": ["up_proj"]}, "config.target_modules"),
        ({"target_modules": r".*layers\.0\.mlp\.(gate|up)_proj|.*layers\.1\.mlp\.up_proj"}, "config.target_modules"),
        ({"bias": "all"}, "config.bias"),
        ({"init_lora_weights": "pissa"}, "config.init_lora_weights"),
        ({"trainable_token_indices": [3, 4]}, "config.trainable_token_indices"),
    ],
)
def test_what_sglang_cannot_do_is_refused_when_a_source_is_made(
    tiny_model: Path, config: dict[str, Any], field: str
) -> None:
    model = adapted(tiny_model, 17, **config)
    with pytest.raises(sr.ConfigError) as caught:
        sr.LoRASource(model)
    assert caught.value.field == field


def test_what_is_trained_besides_an_adapter_is_refused(tiny_model: Path) -> None:
    model = adapted(tiny_model, 19)
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(sr.ConfigError, match=r"model\.norm\.weight"):
        sr.LoRASource(model)


def test_a_source_names_the_adapters_that_there_are(tiny_model: Path) -> None:
    with pytest.raises(sr.ConfigError, match=r"\['default'\]"):
        sr.LoRASource(adapted(tiny_model, 18), "policy", config={"r": 4, "lora_alpha": 8})
    with pytest.raises(sr.ConfigError, match="must be a LoraConfig"):
        sr.LoRASource(adapted(tiny_model, 18), config=4)
    with pytest.raises(sr.ConfigError, match="peft_config"):
        sr.LoRASource(trained(tiny_model, 0))
