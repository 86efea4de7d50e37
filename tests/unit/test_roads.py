"""Weights on their way to remote engines: by broadcast, over real gloo groups on loopback, and by files."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import sglrollout as sr
from sglrollout.engine.mirror import Mirror
from sglrollout.testing import ScriptedEngine
from sglrollout.weights.disk import DiskRoad
from sglrollout.weights.folders import FolderWriter
from sglrollout.weights.group import Group, address_towards
from sglrollout.weights.transfer import Clock
from sglrollout.wire.delta import DeltaError, File
from tests.remote_engine import RemoteEngine, joined

pytestmark = pytest.mark.timeout(60)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
BUCKET_BYTES = 2048


def weights() -> dict[str, torch.Tensor]:
    """Elements of several sizes, in numbers that leave the next one at an odd place."""
    return {
        "bytes": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "large": torch.randn(40, 16),
        "half": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.0),
        "wide": torch.randn(9).double(),
        "more": torch.randn(17, 11).half(),
    }


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names of one parameter, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 5)
        self.head = torch.nn.Linear(5, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(5)


class Bench:
    def __init__(self, rollout: sr.AsyncRolloutEngine, syncer: sr.WeightSyncer, sent: Any) -> None:
        self.rollout, self.syncer, self.sent = rollout, syncer, sent

    @property
    def states(self) -> list[str]:
        return [engine.state for engine in self.rollout.engines]


@asynccontextmanager
async def bench(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[Bench]:
    sent = weights()
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=engines) as rollout:
        options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 5.0, **options}
        async with sr.WeightSyncer(rollout, sr.TensorSource(lambda: sent.items()), **options) as syncer:
            yield Bench(rollout, syncer, sent)


def are_equal(engine: RemoteEngine, sent: dict[str, torch.Tensor]) -> bool:
    engine.received.pop("sglrollout.trial", None)
    return engine.received.keys() == sent.keys() and all(
        engine.received[name].dtype == tensor.dtype and torch.equal(engine.received[name], tensor)
        for name, tensor in sent.items()
    )


def failing(command: str, reason: str = "out of luck", times: int = 1) -> Callable[[str, dict[str, Any]], str | None]:
    """Fail a command so often, and the trial of a group never."""
    left = [times]

    def fail(name: str, arguments: dict[str, Any]) -> str | None:
        if name != command or "sglrollout.trial" in arguments.get("names", ()) or not left[0]:
            return None
        left[0] -= 1
        return reason

    return fail


# ------------------------------------------------------------ by broadcast


async def test_a_broadcast_brings_every_weight_bit_for_bit_to_all_tp_ranks_of_all_remote_engines() -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1", tp_size=3)]
    async with bench(*engines) as b:
        for version in (1, 2):
            b.sent.update(weights())
            report = await b.syncer.sync()
            assert (report.version, report.method, report.num_engines) == (version, "broadcast", 2)
            assert report.num_buckets > 1
            assert report.num_bytes == sum(tensor.nbytes for tensor in b.sent.values())
            assert all(are_equal(engine, b.sent) for engine in engines)
        assert [engine.num_groups for engine in engines] == [1, 1]  # one group serves all syncs
        assert b.states == ["ready", "ready"]


async def test_engines_here_and_engines_elsewhere_get_weights_in_one_sync() -> None:
    here, there = ScriptedEngine("engine-0"), RemoteEngine("remote-0")
    async with bench(here, there) as b:
        report = await b.syncer.sync()
        assert (report.method, report.num_engines) == ("portable+broadcast", 2)
        assert are_equal(there, b.sent)
        assert (here.weights, here.weight_version, there.weight_version) == (1, 1, 1)
        assert "begin_update" not in here.commands
        assert "load_portable" not in there.commands


async def test_a_tied_weight_arrives_under_all_its_names() -> None:
    engine, module = RemoteEngine("remote-0"), Tied()
    async with (
        sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(module)) as syncer,
    ):
        await syncer.sync()
    assert are_equal(engine, dict(module.state_dict()))


async def test_an_engine_that_comes_back_makes_the_group_anew_for_all() -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1")]
    config = CONFIG.model_copy(update={"max_restarts": 3, "restart_delay_s": 0.01})
    async with sr.AsyncRolloutEngine(config=config, engines=engines) as rollout:
        sent = weights()
        async with sr.WeightSyncer(rollout, sr.TensorSource(sent), bucket_bytes=BUCKET_BYTES) as syncer:
            await syncer.sync()
            engines[1].die()
            with anyio.fail_after(10):
                while rollout.engines[1].state not in ("ready", "stale"):
                    await anyio.sleep(0.01)
            await syncer.sync()
            assert [engine.num_groups for engine in engines] == [2, 2]
            assert len(engines[0].groups) == 1  # it left the old one
            assert are_equal(engines[1], sent)


async def test_engines_leave_the_group_when_the_syncer_is_closed() -> None:
    engine = RemoteEngine("remote-0")
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout:
        async with sr.WeightSyncer(rollout, sr.TensorSource(weights())) as syncer:
            await syncer.sync()
            assert len(engine.groups) == 1
        assert not engine.groups


# ------------------------------------------------------------ broadcasts that fail


async def test_an_engine_that_cannot_take_a_bucket_ends_the_sync_for_all_at_once_and_the_next_one_heals_it() -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1", fail=failing("receive_weights"))]
    async with bench(*engines) as b:
        with anyio.fail_after(15), pytest.raises(sr.WeightSyncError, match="out of luck") as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine) == ("transfer", "remote-1")
        assert b.states == ["stale", "stale"]
        assert not any(engine.is_updating for engine in engines)
        await b.syncer.sync()
        assert b.states == ["ready", "ready"]
        assert all(are_equal(engine, b.sent) for engine in engines)


async def test_an_engine_that_waits_for_a_broadcast_which_will_not_come_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broadcast = Group.broadcast

    def stuck(group: Group, tensor: torch.Tensor, wait: Callable[[Callable[[], bool], str], None]) -> None:
        if tensor.numel() > 4:  # it is not the trial
            wait(lambda: False, "it is stuck")
        broadcast(group, tensor, wait)

    monkeypatch.setattr(Group, "broadcast", stuck)
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1")]

    class Failing(RemoteEngine):
        async def before_receiving(self, names: list[str]) -> None:
            while "sglrollout.trial" not in names:
                if engines[0].is_waiting:
                    raise sr.EngineRequestError(self.name, "out of luck")
                await anyio.sleep(0.01)

    engines[1] = Failing("remote-1")
    async with bench(*engines) as b:
        with pytest.raises(sr.WeightSyncError, match="out of luck"):
            await b.syncer.sync()
        with anyio.fail_after(15):  # its own deadline is beyond that
            while engines[0].is_waiting:
                await anyio.sleep(0.05)


async def test_an_engine_that_does_not_join_changes_nothing() -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1", fail=failing("init_group"))]
    async with bench(*engines) as b:
        with anyio.fail_after(15), pytest.raises(sr.WeightSyncError, match="out of luck") as caught:
            await b.syncer.sync()
        assert caught.value.phase == "plan"
        assert b.states == ["ready", "ready"]
        assert (await b.rollout.generate([[1, 2]]))[0].completions
        await b.syncer.sync()
        assert all(are_equal(engine, b.sent) for engine in engines)


def trial(answer: str) -> Callable[[str, dict[str, Any]], str | None]:
    return lambda name, arguments: answer if "sglrollout.trial" in arguments.get("names", ()) else None


async def test_a_broadcast_that_does_not_come_through_is_found_before_any_weight_moves() -> None:
    engine = RemoteEngine("remote-0", fail=trial("NCCL is not well"))
    async with bench(engine) as b:
        with anyio.fail_after(15), pytest.raises(sr.WeightSyncError, match="NCCL is not well"):
            await b.syncer.sync()
        assert b.states == ["ready"]
        assert not engine.received
        assert not engine.is_updating
        engine.fail = lambda name, arguments: None
        await b.syncer.sync()
        assert engine.num_groups == 2  # nobody trusts the first one any more


async def test_nccl_that_cannot_share_memory_between_the_two_says_which_variable_to_set() -> None:
    why = "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9"
    async with bench(RemoteEngine("remote-0", fail=trial(why))) as b:
        with anyio.fail_after(15), pytest.raises(sr.WeightSyncError, match=r"NCCL error in.*NCCL_CUMEM_ENABLE=0"):
            await b.syncer.sync()
        assert b.states == ["ready"]


class Particular(RemoteEngine):
    """Its model's loader fails at names that it does not know, once the tensor has come."""

    async def after_receiving(self, names: list[str]) -> None:
        if "sglrollout.trial" in names:
            raise sr.EngineRequestError(self.name, "receive_weights failed: KeyError: 'sglrollout.trial'")


async def test_a_model_that_knows_no_such_name_passes_the_trial() -> None:
    engine = Particular("remote-0")
    async with bench(engine) as b:
        await b.syncer.sync()
        assert are_equal(engine, b.sent)


async def test_a_sync_that_is_cancelled_while_it_sends_ends_in_time_and_leaves_engines_stale() -> None:
    began = anyio.Event()

    class Slow(RemoteEngine):
        async def before_receiving(self, names: list[str]) -> None:
            if "sglrollout.trial" not in names:
                began.set()
                await anyio.sleep_forever()

    async with bench(Slow("remote-0")) as b, anyio.create_task_group() as tasks:

        async def cancel() -> None:
            await began.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel)
        with anyio.fail_after(15):
            await b.syncer.sync()
    assert b.states != ["ready"]


async def test_a_host_to_which_there_is_no_way_is_named() -> None:
    engine = RemoteEngine("remote-0")
    engine.url = "http://no-such-host.invalid:30000"
    async with bench(engine) as b:
        with pytest.raises(sr.WeightSyncError, match=r"there is no way to no-such-host\.invalid"):
            await b.syncer.sync()
        assert b.states == ["ready"]


async def test_engines_that_began_an_update_which_another_could_not_begin_do_not_stay_in_it() -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1", fail=failing("begin_update"))]
    async with bench(*engines) as b:
        with pytest.raises(sr.WeightSyncError, match="out of luck"):
            await b.syncer.sync()
        assert b.states == ["ready", "ready"]
        assert not any(engine.is_updating for engine in engines)
        await b.syncer.sync()
        assert all(are_equal(engine, b.sent) for engine in engines)


async def test_a_sync_that_is_cancelled_during_the_trial_leaves_no_update_open() -> None:
    class Slow(RemoteEngine):
        async def before_receiving(self, names: list[str]) -> None:
            tasks.cancel_scope.cancel()
            await anyio.sleep_forever()

    engine = Slow("remote-0")
    async with bench(engine) as b:
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(15):
                await b.syncer.sync()
        assert (b.states, engine.is_updating) == (["ready"], False)


async def test_a_trial_that_an_engine_refuses_before_it_has_come_proves_nothing() -> None:
    engine = RemoteEngine("remote-0", fail=trial("{'names': ['sglrollout.trial']} is not what I take"))
    async with bench(engine, timeout_s=1.0) as b:
        with anyio.fail_after(15), pytest.raises(sr.WeightSyncError, match="was not taken by all remote engines"):
            await b.syncer.sync()
        assert b.states == ["ready"]
        assert not engine.is_updating


async def test_a_rendezvous_has_the_same_port_again_after_a_broadcast_that_failed() -> None:
    port = address_and_port()[1]
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1", fail=failing("receive_weights"))]
    async with bench(*engines, remote=sr.Broadcast(port=port)) as b:
        with pytest.raises(sr.WeightSyncError, match="out of luck"):
            await b.syncer.sync()
        gc.disable()  # nothing that only a collection frees may have it
        try:
            await b.syncer.sync()
        finally:
            gc.enable()
        assert all(are_equal(engine, b.sent) for engine in engines)


def address_and_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: tuple[str, int] = server.getsockname()
        return address


async def test_engines_leave_the_group_of_a_sync_that_could_not_plan() -> None:
    class Late(RemoteEngine):
        async def _remote_init_group(self, *arguments: Any, **named: Any) -> None:
            while not engines[0].groups:
                await anyio.sleep(0.01)
            raise sr.EngineRequestError(self.name, "out of luck")

    engines = [RemoteEngine("remote-0"), Late("remote-1")]
    async with bench(*engines, timeout_s=1.0) as b:
        with pytest.raises(sr.WeightSyncError, match="out of luck"):
            await b.syncer.sync()
        assert engines[0].groups
    assert not engines[0].groups


async def test_engines_leave_the_group_of_a_syncer_also_if_another_has_come_since() -> None:
    engine = RemoteEngine("remote-0")
    async with bench(engine) as b:
        await b.syncer.sync()
        async with sr.WeightSyncer(b.rollout, sr.TensorSource(weights())) as other:
            await other.sync()
            await b.syncer.close()
            assert len(engine.groups) == 1
            await other.sync()
        assert not engine.groups


async def test_a_server_that_loads_from_a_disk_is_told_to_load_again_only_once_it_has(tmp_path: Path) -> None:
    class Slow(RemoteEngine):
        """Like SGLang, it goes on with what nobody waits for any more."""

        num_loading = most_at_once = 0

        async def _remote_load_from_disk(self, path: str) -> None:
            async def load() -> None:
                self.num_loading += 1
                self.most_at_once = max(self.most_at_once, self.num_loading)
                await asyncio.sleep(0.5)
                self.num_loading -= 1

            await asyncio.shield(asyncio.ensure_future(load()))

    class Mortal(RemoteEngine):
        async def _remote_load_from_disk(self, path: str) -> None:
            self.die("killed")
            raise sr.EngineDiedError(self.name, "killed")

    slow = Slow("remote-0")
    async with bench(slow, Mortal("remote-1"), remote=sr.Disk(tmp_path)) as b:
        assert (await b.syncer.sync()).lost_engines == ("remote-1",)
        assert (slow.commands.count("load_from_disk"), slow.most_at_once) == (2, 1)


async def test_an_engine_that_died_during_a_sync_and_is_up_again_is_not_told_that_it_has_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reborn(RemoteEngine):
        async def _remote_load_from_disk(self, path: str) -> None:
            if self.num_lives == 1:
                self.die()
                with anyio.fail_after(10):
                    while not (self.num_lives > 1 and self.alive):
                        await anyio.sleep(0.01)

        num_lives = 0

        async def start(self) -> Any:
            self.num_lives += 1
            return await super().start()

    engine = Reborn("remote-1")
    config = CONFIG.model_copy(update={"max_restarts": 3, "restart_delay_s": 0.01})
    async with (
        sr.AsyncRolloutEngine(config=config, engines=[RemoteEngine("remote-0"), engine]) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource(weights()), remote=sr.Disk(tmp_path)) as syncer,
    ):
        report = await syncer.sync()
        assert "it was restarted meanwhile" in caplog.text
        assert (report.lost_engines, report.num_engines) == (("remote-1",), 1)
        assert engine.weight_version == 0
        with anyio.fail_after(10):
            while rollout.engines[1].state != "stale":
                await anyio.sleep(0.01)
        await syncer.sync()
        assert [status.state for status in rollout.engines] == ["ready", "ready"]


# ------------------------------------------------------------ weights


@pytest.mark.parametrize("engine", [RemoteEngine("remote-0"), ScriptedEngine("engine-0")], ids=["remote", "local"])
@pytest.mark.parametrize("large", [True, False])
async def test_a_weight_without_elements_may_be_all_that_is_in_a_bucket(engine: ScriptedEngine, large: bool) -> None:
    sent = {"empty": torch.zeros(0, 4)} | ({"large": torch.randn(BUCKET_BYTES)} if large else {})
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[type(engine)(engine.name)]) as rollout:
        options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "method": "portable"}
        async with sr.WeightSyncer(rollout, sr.TensorSource(sent), **options) as syncer:
            report = await syncer.sync()
        assert (report.num_tensors, report.num_buckets) == (len(sent), int(large))
        assert rollout.engines[0].state == "ready"


async def test_nothing_that_a_source_made_is_held_once_a_sync_is_over() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        made.clear()
        for i in range(3):
            tensor = torch.randn(BUCKET_BYTES)
            made.append(weakref.ref(tensor))
            yield f"weight-{i}", tensor

    async with (
        sr.AsyncRolloutEngine(config=CONFIG, engines=[RemoteEngine("remote-0")]) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource(make), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        await syncer.sync()
        assert [tensor() for tensor in made] == [None] * 3


# ------------------------------------------------------------ the group


def test_a_group_is_apart_from_those_of_torch_and_listens_at_its_address_alone() -> None:
    group = Group("a-group", "gloo", "127.0.0.1", 0, 10.0, None)
    try:
        assert not dist.is_initialized()
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.2", group.port), 1):
            pass
        with socket.create_connection(("127.0.0.1", group.port), 1):
            pass
    finally:
        group.close()


def test_a_group_that_does_not_come_together_says_so_in_time() -> None:
    group = Group("a-group", "gloo", "127.0.0.1", 0, 0.5, None)
    with pytest.raises(sr.WeightSyncError, match="did not join a-group"):
        group.connect(2)
    group.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(sr.WeightSyncError, match=f"cannot listen at 127.0.0.1, port {port}"):
            Group("a-group", "gloo", "127.0.0.1", port, 1.0, None)


async def test_a_broadcast_into_a_group_that_one_has_left_fails() -> None:
    group = Group("a-group", "gloo", "127.0.0.1", 0, 10.0, None)
    others: list[Any] = []

    async def join() -> None:
        others.append(
            await anyio.to_thread.run_sync(lambda: joined("a-group", 1, group.address, group.port, 2, "gloo"))
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(join)
        await anyio.to_thread.run_sync(lambda: group.connect(2))
    others.clear()
    clock = Clock(10.0, lambda: False)

    def broadcast() -> None:
        for _ in range(100):
            group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), clock.wait)

    with pytest.raises(sr.WeightSyncError, match="broke"):
        broadcast()
    group.close()


def test_the_address_towards_a_host_is_that_of_the_interface_to_it() -> None:
    assert address_towards([("127.0.0.1", 80)]) == "127.0.0.1"


def test_a_server_on_this_machine_does_not_hide_the_address_by_which_the_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"localhost": "127.0.0.1", "here": "::1", "there": "10.0.0.1", "afar": "10.1.0.1"}
    monkeypatch.setattr("sglrollout.weights.group._own_address", lambda host, port: own[host])
    assert address_towards([("localhost", 80), ("here", 80), ("there", 80), ("afar", 80)]) == "10.0.0.1"
    assert address_towards([("here", 80), ("localhost", 80)]) == "::1"


# ------------------------------------------------------------ by files


async def test_a_disk_brings_every_weight_in_files_that_a_model_s_folder_has(tmp_path: Path) -> None:
    engines = [RemoteEngine("remote-0"), RemoteEngine("remote-1")]
    async with bench(*engines, remote=sr.Disk(tmp_path)) as b:
        await b.syncer.sync()
        b.sent.update(weights())
        report = await b.syncer.sync()
        assert report.method == "disk"
        assert all(are_equal(engine, b.sent) for engine in engines)
        (folder,) = tmp_path.iterdir()  # the one before is gone
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == b.sent.keys()
        assert index["metadata"]["total_size"] == report.num_bytes
        for name, file in index["weight_map"].items():
            with safe_open(folder / file, "pt") as opened:
                assert torch.equal(opened.get_tensor(name), b.sent[name])
    assert folder.exists()  # for whoever wants the weights


async def test_an_engine_that_cannot_read_the_files_is_stale_and_no_part_of_a_folder_is_left(tmp_path: Path) -> None:
    engine = RemoteEngine("remote-0", fail=failing("load_from_disk", "no such folder"))
    async with bench(engine, remote=sr.Disk(tmp_path)) as b:
        with pytest.raises(sr.WeightSyncError, match="no such folder"):
            await b.syncer.sync()
        assert b.states == ["stale"]
        await b.syncer.sync()
        assert are_equal(engine, b.sent)
    assert not list(tmp_path.glob(".unfinished*"))


async def test_a_folder_that_cannot_be_written_any_more_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    engine = RemoteEngine("remote-0")
    async with bench(engine, remote=sr.Disk(folder)) as b:
        folder.rmdir()
        with pytest.raises(sr.WeightSyncError, match=str(folder)):
            await b.syncer.sync()
        folder.mkdir()
        await b.syncer.sync()
        assert are_equal(engine, b.sent)


async def test_folders_of_syncs_that_failed_are_removed_by_the_next_one(tmp_path: Path) -> None:
    engine = RemoteEngine("remote-0", fail=failing("load_from_disk", "no such folder", times=2))
    async with bench(engine, remote=sr.Disk(tmp_path)) as b:
        for _ in range(2):
            with pytest.raises(sr.WeightSyncError, match="no such folder"):
                await b.syncer.sync()
        await b.syncer.sync()
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(RemoteEngine("remote-0"), remote=sr.Disk(tmp_path)) as b:
        begin = DiskRoad.begin

        def begin_without_folder(road: DiskRoad) -> None:
            begin(road)
            for folder in tmp_path.iterdir():
                folder.rmdir()

        monkeypatch.setattr(DiskRoad, "begin", begin_without_folder)
        with pytest.raises(sr.WeightSyncError, match=r"model-00001-of-\d+\.safetensors could not be written"):
            await b.syncer.sync()


# ------------------------------------------------------------ by what has changed


def mirrored(tmp_path: Path, *names: str) -> list[RemoteEngine]:
    return [RemoteEngine(name, mirror=Mirror(tmp_path / name)) for name in names]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


async def test_changes_bring_every_weight_bit_for_bit_and_are_no_more_than_the_weights(
    tmp_path: Path, shared: Path
) -> None:
    engines = mirrored(tmp_path, "remote-0", "remote-1")
    async with bench(*engines, remote=sr.Disk(shared, delta=True)) as b:
        report = await b.syncer.sync()
        assert (report.method, report.written_bytes) == ("delta", report.num_bytes)
        assert all(are_equal(engine, b.sent) for engine in engines)
        b.sent["large"][3, 5] = 7.0
        b.sent["scalar"].neg_()
        report = await b.syncer.sync()
        assert report.written_bytes == 2 * 4 + 2  # an element each; the gap to a scalar's would be more than it saves
        assert all(are_equal(engine, b.sent) for engine in engines)
        b.sent.update(weights())
        report = await b.syncer.sync()
        assert report.num_bytes / 2 < report.written_bytes <= report.num_bytes
        assert all(are_equal(engine, b.sent) for engine in engines)
        (folder,) = shared.iterdir()
        assert folder.name.startswith("changes-")


async def test_one_name_of_a_tied_weight_is_as_the_other(tmp_path: Path, shared: Path) -> None:
    (engine,) = mirrored(tmp_path, "remote-0")
    model = Tied()
    async with (
        sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), remote=sr.Disk(shared, delta=True)) as syncer,
    ):
        for _ in range(2):
            await syncer.sync()
            assert torch.equal(engine.received["embed.weight"], model.embed.weight)
            assert torch.equal(engine.received["head.weight"], model.embed.weight)
            with torch.no_grad():
                model.embed.weight[2, 3] += 1


async def test_an_engine_whose_copy_is_another_gets_all_and_the_others_what_has_changed(
    tmp_path: Path, shared: Path
) -> None:
    engines = mirrored(tmp_path, "remote-0", "remote-1")
    async with bench(*engines, remote=sr.Disk(shared, delta=True)) as b:
        whole = (await b.syncer.sync()).written_bytes
        engines[1].mirror = Mirror(tmp_path / "another")
        b.sent["large"][3, 5] = 7.0
        assert (await b.syncer.sync()).written_bytes == whole + 6
        assert all(are_equal(engine, b.sent) for engine in engines)
        b.sent["large"][3, 5] = 8.0
        assert (await b.syncer.sync()).written_bytes == 6
        assert all(are_equal(engine, b.sent) for engine in engines)


async def test_a_plan_made_anew_builds_on_the_weights_of_the_last_sync(tmp_path: Path, shared: Path) -> None:
    """As after a sync of another syncer's, or once an engine came back."""
    engines = mirrored(tmp_path, "remote-0", "remote-1")
    others = weights()
    async with bench(*engines, remote=sr.Disk(shared, delta=True)) as b:
        whole = (await b.syncer.sync()).written_bytes
        source = sr.TensorSource(others)
        async with sr.WeightSyncer(b.rollout, source, remote=sr.Disk(shared)) as other:
            assert (await other.sync()).written_bytes == whole
            assert all(are_equal(engine, others) for engine in engines)
        b.sent["large"][3, 5] = 7.0
        report = await b.syncer.sync()
        assert report.plan_s > 0
        assert report.written_bytes == 6
        assert all(are_equal(engine, b.sent) for engine in engines)


async def test_an_engine_that_finds_its_copy_damaged_gets_all_within_the_sync_and_that_is_logged(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = mirrored(tmp_path, "remote-0", "remote-1")
    async with bench(*engines, remote=sr.Disk(shared, delta=True)) as b:
        whole = (await b.syncer.sync()).written_bytes
        assert engines[0].mirror is not None
        for path in engines[0].mirror.folder.glob("*.safetensors"):
            file = File(path)
            if "large" in file.names:
                file.bits("large")[0] ^= 1
        b.sent["scalar"].neg_()  # so that what is damaged did not change
        assert (await b.syncer.sync()).written_bytes == whole + 4
        assert all(are_equal(engine, b.sent) for engine in engines)
    (record,) = (record for record in caplog.records if record.name == "sglrollout.weights")
    assert "remote-0 gets all weights" in record.getMessage()
    assert "large is not bit for bit what the trainer has" in record.getMessage()


class FullMirror(Mirror):
    """On a disk without room."""

    def update(self, source: Path, new_id: str) -> None:
        raise DeltaError("no space left")


@pytest.mark.parametrize("how", ["refuses", "fails"])
async def test_an_engine_that_cannot_take_even_all_weights_is_stale_until_it_can(
    tmp_path: Path, shared: Path, how: str
) -> None:
    (engine,) = mirrored(tmp_path, "remote-0")
    async with bench(engine, remote=sr.Disk(shared, delta=True)) as b:
        whole = (await b.syncer.sync()).written_bytes
        b.sent["large"][3, 5] += 1.0
        mirror = engine.mirror
        if how == "refuses":
            engine.mirror = FullMirror(tmp_path / "full")
        else:
            engine.fail = failing("load_mirror")
        with pytest.raises(sr.WeightSyncError, match=r"no space left|out of luck") as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine) == ("transfer", "remote-0")
        assert b.states == ["stale"]
        engine.mirror = mirror  # which is up to date where loading alone failed
        assert (await b.syncer.sync()).written_bytes == (whole if how == "refuses" else 0)
        assert are_equal(engine, b.sent)
    assert len(list(shared.iterdir())) == 1


async def test_an_engine_that_keeps_no_copy_is_refused_before_anything_is_written(tmp_path: Path, shared: Path) -> None:
    engines = [*mirrored(tmp_path, "remote-0"), RemoteEngine("remote-1")]
    async with bench(*engines, remote=sr.Disk(shared, delta=True)) as b:
        with pytest.raises(sr.ConfigError, match=r"remote-1 keeps no copy of its weights.*sglrollout serve"):
            await b.syncer.sync()
        assert b.states == ["ready", "ready"]
    assert list(shared.iterdir()) == []


async def test_a_copy_is_that_of_the_sync_even_if_one_before_it_broke_off(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trainer keeps is a mixture then, and nothing may be built on it."""
    (engine,) = mirrored(tmp_path, "remote-0")
    async with bench(engine, remote=sr.Disk(shared, delta=True)) as b:
        whole = (await b.syncer.sync()).written_bytes
        b.sent.update(weights())
        add, calls = FolderWriter.add, itertools.count()

        def add_or_fail(writer: FolderWriter, *arguments: Any) -> None:
            if next(calls) == 1:
                raise sr.WeightSyncError("transfer", "the disk is full")
            add(writer, *arguments)

        monkeypatch.setattr(FolderWriter, "add", add_or_fail)
        with pytest.raises(sr.WeightSyncError, match="the disk is full"):
            await b.syncer.sync()
        assert (await b.syncer.sync()).written_bytes == whole
        assert are_equal(engine, b.sent)


# ------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: sr.Broadcast(backend="mpi"), "backend"),  # type: ignore[arg-type]
        (lambda: sr.Broadcast(address=""), "address"),
        (lambda: sr.Broadcast(port=70000), "port"),
        (lambda: sr.Broadcast(port=True), "port"),
        (lambda: sr.Disk("weights"), "folder"),
        (lambda: sr.Disk("/no/such/folder"), "folder"),
        (lambda: sr.Disk("/tmp", delta=1), "delta"),  # type: ignore[arg-type]
        (lambda: sr.WeightSyncer(None, sr.TensorSource({}), remote="disk"), "remote"),  # type: ignore[arg-type]
    ],
)
def test_options_that_are_wrong_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        make()
    assert caught.value.field == field
