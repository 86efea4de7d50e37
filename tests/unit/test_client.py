from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import pytest

from sglrollout.engine.client import EngineClient
from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, EngineRequestError, EngineStartError
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.channel import client_channel, host_channel
from sglrollout.wire.messages import Finish, Launch, Load, Output, Outputs, Reply

MORE_THAN_A_SOCKET_HOLDS = [1] * 2_000_000


class GoneHost:
    """A host that has ended, or soon will have, as its launcher tells of it."""

    def __init__(self, ends_after_s: float = 60.0) -> None:
        self.ends_after_s = ends_after_s

    def log_tail(self, num_lines: int) -> str:
        return "killed"

    def how_it_ended(self) -> str:
        return "exit code -9"

    async def ended(self) -> None:
        await asyncio.sleep(self.ends_after_s)

    async def destroy(self, timeout_s: float) -> None:
        pass


async def test_a_host_that_goes_while_a_request_is_being_sent_fails_it_as_a_death() -> None:
    ours, theirs = socket.socketpair()
    client = EngineClient("engine-0", Launch("engine-0", {}, True, [], ""))
    client._channel, client._host = await client_channel(ours), GoneHost()  # type: ignore[assignment]
    client.info = await ScriptedEngine().start()
    deaths: list[Exception] = []
    client.on_death = deaths.append
    running = asyncio.ensure_future(client.run())
    request = Request(MORE_THAN_A_SOCKET_HOLDS, {})
    sending = asyncio.ensure_future(client.submit(request))
    await asyncio.sleep(0.02)
    assert not sending.done()
    theirs.close()
    with anyio.fail_after(5):
        await sending
        await running
    assert deaths == [request.error]
    assert isinstance(request.error, EngineDiedError)
    assert request.error.log_tail == "killed"


async def running_client(
    sock: socket.socket, host: GoneHost
) -> tuple[EngineClient, asyncio.Future[None], list[Exception]]:
    client = EngineClient("engine-0", Launch("engine-0", {}, True, [], ""))
    client._channel, client._host = await client_channel(sock), host  # type: ignore[assignment]
    client.info = await ScriptedEngine().start()
    deaths: list[Exception] = []
    client.on_death = deaths.append
    return client, asyncio.ensure_future(client.run()), deaths


async def test_a_host_whose_end_of_the_channel_a_fork_holds_open_is_known_to_be_dead() -> None:
    ours, theirs = socket.socketpair()
    _, running, deaths = await running_client(ours, GoneHost(ends_after_s=0.1))
    with theirs, anyio.fail_after(2):
        await running
    assert "exit code -9" in str(deaths[0])


async def test_a_request_that_the_engine_fails_has_an_error_that_says_so() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    host = await host_channel(theirs)
    requests = [Request([1], {}), Request([1], {}), Request([1], {"logprobs": False})]
    for request in requests:
        request.engine = client.name
        await client.submit(request)
    failed, unpaired, good = requests
    end = Finish("error", message="no such grammar")
    host.send(Outputs(0, [Output(failed.request_id, [], None, end)]))
    host.send(Outputs(0, [Output(unpaired.request_id, [5], None, None)]))
    host.send(Outputs(0, [Output(good.request_id, [5], None, Finish("length"))]))
    with anyio.fail_after(2):
        while not all(request.ended for request in requests):
            await asyncio.sleep(0.01)
    assert isinstance(failed.error, EngineRequestError)
    assert str(failed.error) == "engine-0: no such grammar"
    assert isinstance(unpaired.error, EngineRequestError)
    assert (unpaired.token_ids, unpaired.logprobs) == ([], [])
    assert (good.error, good.token_ids, good.logprobs) == (None, [5], None)
    await host.close()
    await running


async def test_a_command_to_a_dead_engine_fails_at_once() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    theirs.close()
    await running
    with anyio.fail_after(1), pytest.raises(EngineDiedError):
        await client.command("flush_cache", timeout_s=1.0)


async def test_a_log_directory_that_cannot_be_made_is_a_start_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    launch = Launch("engine-0", {}, True, [], "")
    client = EngineClient("engine-0", launch, log_dir=str(tmp_path / "file" / "logs"))
    with pytest.raises(EngineStartError, match="its host could not be started"):
        await client.start()
    await client.close()


async def test_commands_in_a_row_that_nobody_answered_are_counted() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    client._control_timeout_s = 0.02
    host = await host_channel(theirs)
    with pytest.raises(EngineRequestError, match=r"was not answered within 0\.02 s"):
        await client.command("memory")
    assert client.num_unanswered == 1
    client._control_timeout_s = 5.0

    async def command(reply: Callable[[int], Reply]) -> None:
        answering = asyncio.ensure_future(client.command("memory"))
        while not client._replies:
            await asyncio.sleep(0)
        host.send(reply(max(client._replies)))
        with suppress(EngineRequestError):
            await answering

    await command(lambda number: Reply(number, "TimeoutError: SGLang did not answer", True))
    assert client.num_unanswered == 2
    await command(lambda number: Reply(number, "RuntimeError: no"))
    assert client.num_unanswered == 0
    await host.close()
    await running


async def test_tokens_and_news_of_the_load_are_progress_and_the_same_news_again_are_not() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    host = await host_channel(theirs)
    seen: list[tuple[int, int]] = []
    load = Load(1, 1, 0, 0.1, 0.0, 100.0, published_s=5.0)
    for message in (load, load, msgspec.structs.replace(load, published_s=6.0), Outputs(0, [Output(9, [5], None)])):
        host.send(message)
        await host.drain()
        await asyncio.sleep(0.02)
        seen.append((client.progress, client.num_outputs))
    assert seen == [(1, 0), (1, 0), (2, 0), (3, 1)]
    await host.close()
    await running
