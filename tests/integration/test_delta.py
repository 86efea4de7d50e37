"""Real SGLang servers that this library starts, one of them by TLS, get what changed of the weights alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
import trustme

import sglrollout as sr
from sglrollout.wire.delta import File
from tests.reference import answers_like, trained
from tests.remote import until

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of who vouches for a server, and beside it the server's own, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    of_server = authority.issue_cert("127.0.0.1")
    of_server.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return folder / "authority.pem"


@pytest.fixture(scope="module")
async def servers(tiny_model: Path, authority: Path) -> AsyncIterator[list[sr.SGLangServer]]:
    own = str(authority.with_name("server.pem"))
    secure: dict[str, Any] = {"engine_args": {"ssl_certfile": own, "ssl_keyfile": own}}
    async with AsyncExitStack() as stack:
        servers = [sr.launch_server(tiny_model, **{**OPTIONS, **more}) for more in ({}, secure)]
        for server in servers:
            stack.push_async_callback(server.close)
        async with anyio.create_task_group() as starts:
            for server in servers:
                starts.start_soon(server.start)
        yield servers


@pytest.fixture(scope="module")
async def pool(
    tiny_model: Path, servers: list[sr.SGLangServer], authority: Path
) -> AsyncIterator[sr.AsyncRolloutEngine]:
    remote = [sr.RemoteEngine(server.url, api_key=server.api_key, verify=str(authority)) for server in servers]
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=1, remote=remote, **OPTIONS) as pool:
        yield pool


def syncer_of(pool: sr.AsyncRolloutEngine, model: Any, folder: Path) -> sr.WeightSyncer:
    return sr.WeightSyncer(pool, sr.ModuleSource(model), remote=sr.Disk(folder, delta=True), bucket_bytes=1 << 15)


def step(model: Any, every: int) -> None:
    """Change some elements of each weight, so much that it shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::every] *= -1


async def mirrored(server: sr.SGLangServer) -> Path:
    """Where a server keeps its copy."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, verify=False) as http:
        said = (await http.get("/sglrollout/weights")).json()
    assert said["id"]
    return Path(said["folder"])


async def test_servers_get_all_weights_once_and_then_what_changed(
    pool: sr.AsyncRolloutEngine, tiny_model: Path, tmp_path: Path
) -> None:
    model = trained(tiny_model, 1)
    async with syncer_of(pool, model, tmp_path) as syncer:
        first = await syncer.sync("abort")
        assert (first.method, first.num_engines) == ("fast+delta", 3)
        assert await answers_like(pool, model)

        step(model, 50)
        few = await syncer.sync("abort")
        assert 0 < few.written_bytes < first.written_bytes / 20
        assert await answers_like(pool, model)

        none = await syncer.sync("abort")
        assert none.written_bytes == 0
        assert await answers_like(pool, model)

        step(model, 1)
        everything = await syncer.sync("abort")
        assert everything.written_bytes == first.written_bytes
        assert await answers_like(pool, model)
        assert (await syncer.verify()).num_remote == 2
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_server_whose_certificate_nobody_vouches_for_is_refused_and_told_no_key(
    servers: list[sr.SGLangServer], tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "authority.pem"
    trustme.CA().cert_pem.write_to_path(other)
    for verify in (True, str(other)):
        remote = [sr.RemoteEngine(servers[1].url, api_key="a-secret", verify=verify)]
        with anyio.fail_after(20), pytest.raises(sr.EngineStartError, match=r"CERTIFICATE_VERIFY_FAILED.*verify=") as e:
            async with sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=remote):
                pass
        assert "a-secret" not in str(e.value)


async def test_a_copy_that_was_damaged_is_made_anew_within_the_sync(
    pool: sr.AsyncRolloutEngine, servers: list[sr.SGLangServer], tiny_model: Path, tmp_path: Path
) -> None:
    model = trained(tiny_model, 2)
    async with syncer_of(pool, model, tmp_path) as syncer:
        first = await syncer.sync("abort")
        file = next((await mirrored(servers[1])).glob("*.safetensors"))
        weights = File(file)
        weights.bits(weights.names[0])[1] ^= 1
        step(model, 50)
        mended = await syncer.sync("abort")
        assert mended.written_bytes > first.written_bytes  # changes, and all for the other one
        assert await answers_like(pool, model)
        step(model, 50)
        assert (await syncer.sync("abort")).written_bytes < first.written_bytes / 20
        assert await answers_like(pool, model)


async def test_a_server_that_another_trainer_has_given_weights_to_gets_all_of_them(
    pool: sr.AsyncRolloutEngine, servers: list[sr.SGLangServer], tiny_model: Path, tmp_path: Path
) -> None:
    model, other = trained(tiny_model, 3), trained(tiny_model, 4)
    folders = [tmp_path / name for name in ("ours", "theirs")]
    for folder in folders:
        folder.mkdir()
    async with syncer_of(pool, model, folders[0]) as syncer:
        whole = (await syncer.sync("abort")).written_bytes
        async with syncer_of(pool, other, folders[1]) as theirs:
            assert (await theirs.sync("abort")).written_bytes == whole
            assert await answers_like(pool, other)
        step(model, 50)
        assert (await syncer.sync("abort")).written_bytes == whole
        assert await answers_like(pool, model)


async def test_a_server_that_came_back_gets_all_weights_and_leaves_no_copy_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = trained(tiny_model, 6)
    options: dict[str, Any] = {"max_restarts": 20, "restart_delay_s": 0.1}
    async with sr.launch_server(tiny_model, **OPTIONS) as server:
        remote = [sr.RemoteEngine(server.url, api_key=server.api_key, dead_after_s=3.0)]
        async with (
            sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=remote, **options) as pool,
            syncer_of(pool, model, tmp_path) as syncer,
        ):
            whole = (await syncer.sync("abort")).written_bytes
            copy = await mirrored(server)
            await server.close()
            assert not copy.exists()
            await until(lambda: pool.engines[0].state == "restarting", 30.0)
            port = int(server.url.rpartition(":")[2])
            async with sr.launch_server(tiny_model, port=port, api_key=server.api_key, **OPTIONS):
                await until(lambda: pool.engines[0].state == "stale", 120.0)
                step(model, 50)
                assert (await syncer.sync("abort")).written_bytes == whole
                assert await answers_like(pool, model)
