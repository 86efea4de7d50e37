"""One trainer rank of test_weight_sync_ranks.py: ``sync_ranks.py SCENARIO,... OUT OPTIONS``.

Rank 0 owns a real engine on the CPU. What happened in each scenario is written to OUT.RANK as JSON.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from sglrollout.engine.cpu_support import forgive_torchvision

forgive_torchvision()

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import sglrollout as sr  # noqa: E402
from sglrollout import testing  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))  # torchrun starts this as a script
from sglrollout.engine.mirror import Mirror  # noqa: E402
from tests.reference import GREEDY, PROMPTS, greedy, trained  # noqa: E402
from tests.remote_engine import RemoteEngine  # noqa: E402

BUCKET_BYTES = 1 << 15  # so small that every model needs many, and its embedding is cut
OPTIONS = json.loads(sys.argv[3])
DEVICE = OPTIONS.get("device", "cpu")


def shard(model: Any, cut: str) -> Any:
    """Cut a model's parameters over the ranks."""
    size = dist.get_world_size()
    model = model.to(DEVICE)
    if cut == "fsdp":
        mesh = init_device_mesh(DEVICE, (size,))
    elif cut == "hsdp":
        mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("fsdp", "tp"))
        columns = dict.fromkeys(["q_proj", "k_proj", "v_proj"], ColwiseParallel())
        plan = {f"self_attn.{name}": style for name, style in columns.items()}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in model.model.layers:
            rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            parallelize_module(layer, both["tp"], {**plan, **rows})
        mesh = both["fsdp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Cut:
    """Syncs one model, cut in one way, several times, and compares with transformers."""

    def __init__(self, path: Path, rollout: sr.AsyncRolloutEngine | None) -> None:
        self._path, self._rollout = path, rollout

    async def run(self, cut: str, method: Literal["auto", "portable"] = "auto", steps: int = 2) -> dict[str, Any]:
        model = shard(AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32), cut)
        found: dict[str, Any] = {"equal": [], "changed": [], "verified": []}
        last: list[list[int]] = []
        async with sr.WeightSyncer(
            self._rollout, sr.FSDPSource(model), method=method, bucket_bytes=BUCKET_BYTES, timeout_s=30
        ) as syncer:
            for step in range(steps):
                reference = trained(self._path, step)
                copy_into(model, reference)
                report = await syncer.sync()
                verified = await syncer.verify()
                found["verified"].append(verified.num_weights)
                found["report"] = {name: getattr(report, name) for name in ("method", "num_buckets", "num_tensors")}
                if self._rollout is not None:
                    groups = await self._rollout.generate(PROMPTS, sampling=GREEDY)
                    tokens = [list(group.completions[0].token_ids) for group in groups]
                    found["equal"].append(tokens == [greedy(reference, group.prompt_ids) for group in groups])
                    found["changed"].append(tokens != last)
                    last = tokens
        return found


def copy_into(model: Any, reference: Any) -> None:
    """Set a cut model's parameters to those of a whole one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    values = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(
                    values[name].detach().to(DEVICE), parameter.device_mesh, _plain(parameter.placements)
                )
                parameter.copy_(whole.redistribute(parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(values[name])


def _plain(placements: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return [Replicate() for _ in placements]


async def cuts(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    ways = ["fsdp"] if dist.get_world_size() == 2 else ["fsdp", "hsdp", "fsdp x tp"]
    found = {way: await Cut(path, rollout).run(way) for way in ways}
    found["fsdp, portable"] = await Cut(path, rollout).run("fsdp", method="portable")
    return found


async def offloaded(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """Parameters on the CPU, whatever the mesh is on."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    async with sr.WeightSyncer(rollout, sr.FSDPSource(model)) as syncer:
        await syncer.sync()
        return {"verified": (await syncer.verify()).num_weights}


async def after_a_forward(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """FSDP leaves the root's parameters gathered after a forward pass without a backward one."""
    model = shard(trained(path, 5), "fsdp")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]], device=DEVICE))
    async with sr.WeightSyncer(rollout, sr.FSDPSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        await syncer.sync()
        verified = (await syncer.verify()).num_weights
        if rollout is None:
            return {}
        (group,) = await rollout.generate(PROMPTS[:1], sampling=GREEDY)
        reference = trained(path, 5)
        equal = list(group.completions[0].token_ids) == greedy(reference, group.prompt_ids)
        return {"verified": verified, "equal": equal}


async def other_weights(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """One rank has another model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if dist.get_rank() == 1:
        model.model.layers = model.model.layers[:1]
    return await failure(sr.WeightSyncer(rollout, sr.ModuleSource(model)).sync)


async def failing_rank(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """A hook raises on one rank, in the second sync."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    calls: list[str] = []

    def transform(name: str, tensor: Any) -> Any:
        calls.append(name)
        if dist.get_rank() == 1 and len(calls) > 60:
            raise RuntimeError("the hook broke")
        return [(name, tensor)]

    syncer = sr.WeightSyncer(rollout, sr.ModuleSource(model, transform=transform), timeout_s=10)
    await syncer.sync()
    found = await failure(syncer.sync)
    if rollout is not None:
        found["states"] = [engine.state for engine in rollout.engines]
        found["refused"] = await failure(lambda: rollout.generate(PROMPTS, sampling=GREEDY))
    healed = sr.WeightSyncer(rollout, sr.ModuleSource(model), timeout_s=10)
    await healed.sync()
    if rollout is not None:
        found["healed"] = [engine.state for engine in rollout.engines]
    return found


async def failing_shard(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """One rank cannot pack its shard, while the others wait for it in an all-gather."""
    source = sr.FSDPSource(shard(trained(path, 2), "fsdp"))
    read, broken = source.read, [False]

    def breaking_read() -> Callable[[int], Any]:
        inner, calls = read(), [0]

        def one(i: int) -> Any:
            calls[0] += 1
            if broken[0] and dist.get_rank() == 1 and calls[0] > 5:
                raise RuntimeError("a shard is gone")
            return inner(i)

        return one

    source.read = breaking_read  # type: ignore[method-assign]
    syncer = sr.WeightSyncer(rollout, source, bucket_bytes=BUCKET_BYTES, timeout_s=20)
    await syncer.sync()
    broken[0] = True
    begun = time.monotonic()
    found = await failure(syncer.sync)
    found["seconds"] = time.monotonic() - begun
    broken[0] = False
    await syncer.sync()
    found["verified"] = (await syncer.verify()).num_weights
    return found


async def failing_hook(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """A hook raises on one rank, while the others go on to gather whole tensors."""
    broken = [False]

    def transform(name: str, tensor: Any) -> Any:
        if broken[0] and dist.get_rank() == 1 and "layers.0.mlp" in name:
            raise RuntimeError("the hook broke")
        return [(name, tensor)]

    found: dict[str, Any] = {"seconds": 0.0, "verified": [], "text": []}
    methods: list[Literal["fast", "portable"]] = ["fast", "portable"]
    for method in methods:
        source = sr.FSDPSource(shard(trained(path, 6), "fsdp"), transform=transform)
        async with sr.WeightSyncer(rollout, source, method=method, bucket_bytes=BUCKET_BYTES, timeout_s=20) as syncer:
            await syncer.sync()
            broken[0] = True
            begun = time.monotonic()
            found["text"].append((await failure(syncer.sync))["text"])
            found["seconds"] = max(found["seconds"], time.monotonic() - begun)
            broken[0] = False
            await syncer.sync()
            found["verified"].append((await syncer.verify()).num_weights)
    return found


async def two_owners(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """Both ranks own engines, of the same name. In the end that of one rank dies in a sync."""
    other = None
    if rollout is None:
        other = rollout = await sr.AsyncRolloutEngine(path, device="cpu", dtype="float32", max_restarts=0).start()
    found: dict[str, Any] = {"verified": []}
    try:
        methods: list[Literal["fast", "portable"]] = ["fast", "portable"]
        for method in methods:
            source = sr.FSDPSource(shard(trained(path, 3), "fsdp"))
            async with sr.WeightSyncer(rollout, source, method=method, bucket_bytes=BUCKET_BYTES) as syncer:
                assert (await syncer.sync()).num_engines == 2
                found["verified"].append((await syncer.verify()).num_weights)
                if method == "portable":
                    if other is not None:
                        asyncio.get_running_loop().call_later(0.5, stopped_engine(other).kill)
                    report = await syncer.sync()
                    found["lost"] = [report.num_engines, *report.lost_engines]
    finally:
        if other is not None:
            await other.close()
    return found


def stopped_engine(rollout: sr.AsyncRolloutEngine) -> psutil.Process:
    """The scheduler of its engine, which gets no further."""
    info = rollout.engines[0].info
    assert info is not None
    process = psutil.Process(info.child_pids[0])
    process.suspend()
    return process


async def busy(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """The owner's rollout is in the middle of something else."""
    syncer = sr.WeightSyncer(rollout, sr.ModuleSource(trained(path, 4)), timeout_s=10)
    await syncer.sync()
    begun = time.monotonic()
    if rollout is None:
        found = await failure(syncer.sync)
    else:
        with (await rollout._ready_pool()).exclusive("something else"):
            found = await failure(syncer.sync)
    found["seconds"] = time.monotonic() - begun
    await syncer.sync()
    await syncer.close()
    return found


async def lost_rank(
    rollout: sr.AsyncRolloutEngine | None, path: Path, how: signal.Signals, in_a_gather: bool = False
) -> dict[str, Any]:
    """Rank 1 dies, or stops: between two syncs, or in the middle of one."""
    source = sr.FSDPSource(shard(trained(path, 1), "fsdp"))
    read, reading = source.read, [False]

    def deadly_read() -> Callable[[int], Any]:
        inner, calls = read(), [0]

        def one(i: int) -> Any:
            calls[0] += 1
            if reading[0] and dist.get_rank() == 1 and calls[0] > 5:
                os.kill(os.getpid(), how)
            return inner(i)

        return one

    source.read = deadly_read  # type: ignore[method-assign]
    syncer = sr.WeightSyncer(rollout, source, bucket_bytes=BUCKET_BYTES, timeout_s=8)
    await syncer.sync()
    verified = (await syncer.verify()).num_weights
    if dist.get_rank() == 1 and not in_a_gather:
        os.kill(os.getpid(), how)
        await asyncio.sleep(60)
    reading[0] = in_a_gather
    await asyncio.sleep(0.5)
    begun = time.monotonic()
    found = await failure(syncer.sync)
    return {**found, "seconds": time.monotonic() - begun, "verified": verified}


async def failure(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        await call()
    except Exception as error:
        attributes = {name: getattr(error, name, None) for name in ("phase", "rank", "engine")}
        return {"type": type(error).__name__, "text": str(error), **attributes}
    return {"type": None}


async def lora(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """An adapter whose matrices are cut over the ranks."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model = copy.deepcopy(reference)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    async with sr.WeightSyncer(rollout, sr.LoRASource(model), bucket_bytes=1 << 12) as syncer:
        report = await syncer.sync()
        found: dict[str, Any] = {"method": report.method, "num_buckets": report.num_buckets}
        if rollout is not None:
            groups = await rollout.generate(PROMPTS, sampling=GREEDY)
            expected = [greedy(reference, group.prompt_ids) for group in groups]
            found["equal"] = [list(group.completions[0].token_ids) for group in groups] == expected
    return found


async def changes(rollout: sr.AsyncRolloutEngine | None, path: Path) -> dict[str, Any]:
    """What has changed of weights that are cut over the ranks, for a scripted server of rank 0's."""
    engine = RemoteEngine("remote-0", mirror=Mirror(path.parent / "mirror"))
    shared = path.parent / f"shared-{dist.get_rank()}"
    shared.mkdir()
    model = shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "fsdp")
    found: dict[str, Any] = {"written": [], "equal": []}
    async with AsyncExitStack() as stack:
        own = None
        if rollout is not None:
            config = sr.RolloutConfig(model=str(path), progress=False)
            own = await stack.enter_async_context(sr.AsyncRolloutEngine(config=config, engines=[engine]))
        options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "remote": sr.Disk(shared, delta=True)}
        syncer = await stack.enter_async_context(sr.WeightSyncer(own, sr.FSDPSource(model), **options))
        for step in range(3):
            reference = trained(path, 7)
            with torch.no_grad():
                reference.model.norm.weight[step] += step
            copy_into(model, reference)
            found["written"].append((await syncer.sync()).written_bytes)
            state = reference.state_dict()
            found["equal"].append(all(torch.equal(engine.received[n], state[n]) for n in engine.received))
    found["num_weights"] = len(engine.received)
    return found


SCENARIOS: dict[str, Callable[..., Any]] = {
    "lora": lora,
    "changes": changes,
    "cuts": cuts,
    "offloaded": offloaded,
    "after_a_forward": after_a_forward,
    "other_weights": other_weights,
    "failing_rank": failing_rank,
    "failing_shard": failing_shard,
    "failing_hook": failing_hook,
    "two_owners": two_owners,
    "busy": busy,
    "rank_killed_in_a_gather": lambda rollout, path: lost_rank(rollout, path, signal.SIGKILL, in_a_gather=True),
    "stopped_rank": lambda rollout, path: lost_rank(rollout, path, signal.SIGSTOP),
}


async def main() -> None:
    scenarios, out, options = sys.argv[1].split(","), sys.argv[2], OPTIONS
    rank = dist.get_rank()
    directory = Path(out).parent / f"model-{rank}"
    path = testing.tiny_model(directory, vocab_size=options.get("vocab_size", 512), tie=options.get("tie", True))
    rollout = None
    if rank == 0:
        dtype = options.get("dtype", "float32")
        engines = {"num_engines": options.get("num_engines", 1), "tp_size": options.get("tp_size", 1)}
        engine = sr.AsyncRolloutEngine(path, device=DEVICE, dtype=dtype, **engines, **options.get("more", {}))
        rollout = await engine.start()
    dist.barrier()
    found = {}
    try:
        for scenario in scenarios:
            found[scenario] = await SCENARIOS[scenario](rollout, path)
    finally:
        Path(f"{out}.{rank}").write_text(json.dumps(found))
        if rollout is not None:
            await rollout.close()


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    asyncio.run(main())
    os._exit(0)  # a rank that is gone would keep gloo's threads
