from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import anyio
import msgspec
import pytest

from sglrollout.engine import client as client_module
from sglrollout.engine.client import EngineClient
from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, EngineRequestError, EngineStartError, LifecycleError
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.channel import client_channel, host_channel
from sglrollout.wire.messages import (
    PROTOCOL,
    Abort,
    Command,
    Died,
    Finish,
    Hello,
    Launch,
    LaunchFailed,
    Load,
    Output,
    Outputs,
    Reply,
)

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


async def test_that_is_so_with_much_unsent_and_nobody_who_reads_it() -> None:
    ours, theirs = socket.socketpair()
    client, running, deaths = await running_client(ours, GoneHost(ends_after_s=0.1))
    request = Request(MORE_THAN_A_SOCKET_HOLDS, {})
    sending = asyncio.ensure_future(client.submit(request))
    with theirs, anyio.fail_after(2):
        await running
        await sending
    assert isinstance(request.error, EngineDiedError)
    assert len(deaths) == 1


async def test_a_death_that_the_host_tells_of_is_known_at_once_however_long_it_clears_up() -> None:
    ours, theirs = socket.socketpair()
    client, running, deaths = await running_client(ours, GoneHost())
    host = await host_channel(theirs)
    host.send(Died("scheduler 0 ended unasked"))
    with anyio.fail_after(2):
        await running
    assert [str(death).splitlines()[0] for death in deaths] == ["engine-0: scheduler 0 ended unasked"]
    assert not client.alive
    await host.close()


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


async def test_commands_that_nobody_answered_are_counted() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    client._control_timeout_s = 0.02
    host = await host_channel(theirs)
    with pytest.raises(EngineRequestError, match=r"was not answered within 0\.02 s") as caught:
        await client.command("memory")
    assert (client.num_unanswered, caught.value.timed_out) == (1, True)
    client._control_timeout_s = 5.0

    async def command(reply: Callable[[int], Reply]) -> bool:
        answering = asyncio.ensure_future(client.command("memory"))
        while not client._replies:
            await asyncio.sleep(0)
        host.send(reply(max(client._replies)))
        with pytest.raises(EngineRequestError) as failure:
            await answering
        return failure.value.timed_out

    assert await command(lambda number: Reply(number, "TimeoutError: SGLang did not answer", True))
    assert client.num_unanswered == 2
    assert not await command(lambda number: Reply(number, "RuntimeError: no"))
    assert client.num_unanswered == 0
    await host.close()
    await running


async def test_progress_and_answers_also_late_ones_forgive_commands_that_nobody_answered() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    client._control_timeout_s = 0.02
    host = await host_channel(theirs)
    load = Load(1, 1, 0, 0.1, 0.0, 100.0, published_s=5.0)
    counts = []
    for sign in (
        lambda number: Reply(number, "TimeoutError: SGLang did not answer", True),
        lambda number: Reply(number, value={}),
        lambda number: load,
        lambda number: load,
        lambda number: Outputs(0, [Output(9, [5], None)]),
    ):
        client.num_unanswered = 0
        number = client._next_id
        with pytest.raises(EngineRequestError, match="was not answered"):
            await client.command("memory")
        host.send(sign(number))
        await host.drain()
        await asyncio.sleep(0.02)
        counts.append(client.num_unanswered)
    assert counts == [1, 0, 0, 1, 0]
    await host.close()
    await running


async def test_commands_that_schedulers_are_to_answer_are_pending_until_they_are_answered_or_given_up() -> None:
    ours, theirs = socket.socketpair()
    client, running, _ = await running_client(ours, GoneHost())
    host = await host_channel(theirs)
    names = ("describe_weights", "memory", "parse_tool_calls")
    commands = [asyncio.ensure_future(client.command(name)) for name in names]
    while len(client._replies) < len(names):
        await asyncio.sleep(0)
    assert client.num_pending == 2
    host.send(Reply(min(client._replies), value={}))
    await commands[0]
    assert client.num_pending == 1
    commands[1].cancel()
    await asyncio.wait([commands[1]])
    assert client.num_pending == 0
    await host.close()
    await running
    with pytest.raises(EngineDiedError):
        await commands[2]


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


# ------------------------------------------------------------ several lives


class Host:
    """A host on this event loop, in place of a process. It comes up, and serves until it is told to die."""

    lives: ClassVar[list[Host]] = []
    comes_up: ClassVar[bool] = True

    def __init__(self, name: str, sock: socket.socket, devices: Sequence[str], log_dir: str | None) -> None:
        self.scratch_dir = Path("/nowhere")
        self.gone, self.may_go, self.received = asyncio.Event(), asyncio.Event(), list[object]()
        self.may_go.set()
        self.task = asyncio.ensure_future(self._serve(sock))
        Host.lives.append(self)

    async def _serve(self, sock: socket.socket) -> None:
        self.channel = await host_channel(sock)
        await self.channel.handshake(Hello(PROTOCOL, 1, "0"))
        await self.channel.receive()
        if Host.comes_up:
            self.channel.send(await ScriptedEngine().start())
        else:
            self.channel.send(LaunchFailed("no memory"))
        while (message := await self.channel.receive()) is not None:
            self.received.append(message)
            if isinstance(message, Command):
                self.channel.send(Reply(message.command_id))

    async def die(self) -> None:
        await self.channel.close()
        self.gone.set()

    def log_tail(self, num_lines: int) -> str:
        return ""

    def how_it_ended(self) -> str:
        return "exit code -9"

    async def wait(self, timeout_s: float) -> None:
        pass

    async def ended(self) -> None:
        await self.gone.wait()

    async def destroy(self, timeout_s: float) -> None:
        await self.may_go.wait()
        self.gone.set()
        await self.channel.close()
        await asyncio.wait([self.task])


@pytest.fixture
def reborn(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    """A client whose hosts are in :attr:`Host.lives`."""
    monkeypatch.setattr(client_module, "HostProcess", Host)
    monkeypatch.setattr(Host, "lives", [])
    return EngineClient("engine-0", Launch("engine-0", {}, True, [], ""), close_timeout_s=0.1)


async def test_after_a_death_it_starts_again_and_nothing_of_the_first_life_is_left(reborn: EngineClient) -> None:
    deaths: list[Exception] = []
    reborn.on_death = deaths.append
    requests: list[Request] = []
    for life in range(3):
        assert reborn.alive is False
        await reborn.start()
        assert reborn.alive is True
        running = asyncio.ensure_future(reborn.run())
        request = Request([1], {})
        await reborn.submit(request)
        await reborn.command("memory", 1.0)
        for old in requests:
            reborn.abort(old)  # of another life: nobody may take it for one of this
        await reborn.command("memory", 1.0)
        assert not any(isinstance(message, Abort) for message in Host.lives[life].received)
        await Host.lives[life].die()
        with anyio.fail_after(5):
            await running
        assert deaths[life] is request.error
        requests.append(request)
        with pytest.raises(EngineDiedError):
            await reborn.command("memory")
    assert len({request.request_id for request in requests}) == 3
    assert len(deaths) == 3
    await reborn.close()


async def test_it_does_not_start_while_it_is_up_nor_once_it_is_closed(reborn: EngineClient) -> None:
    await reborn.start()
    with pytest.raises(LifecycleError, match="it is up"):
        await reborn.start()
    await reborn.close()
    with pytest.raises(LifecycleError, match="it is closed"):
        await reborn.start()
    assert len(Host.lives) == 1


async def test_a_start_that_failed_may_be_tried_again(reborn: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "comes_up", False)
    for _ in range(2):
        with pytest.raises(EngineStartError, match="no memory"):
            await reborn.start()
    monkeypatch.setattr(Host, "comes_up", True)
    await reborn.start()
    assert reborn.alive
    await reborn.close()
    assert all(host.task.done() for host in Host.lives)


async def test_it_has_not_ended_before_its_host_is_gone(reborn: EngineClient) -> None:
    await reborn.start()
    running = asyncio.ensure_future(reborn.run())
    (host,) = Host.lives
    host.may_go.clear()
    await host.die()
    await asyncio.sleep(0.4)
    assert not reborn.alive
    assert not running.done()
    host.may_go.set()
    with anyio.fail_after(5):
        await running
    await reborn.close()


async def test_killing_it_is_a_death_from_any_state(reborn: EngineClient) -> None:
    deaths: list[Exception] = []
    reborn.on_death = deaths.append
    await reborn.kill("before it began")
    await reborn.start()
    running = asyncio.ensure_future(reborn.run())
    request = Request([1], {})
    await reborn.submit(request)
    with anyio.fail_after(5):
        await reborn.kill("it hangs")
        await running
    await reborn.kill("twice")
    assert [str(death) for death in deaths] == ["engine-0: it hangs"]
    assert request.error is deaths[0]
    await reborn.start()
    await reborn.kill("nobody listens to it yet")
    assert len(deaths) == 2
    await reborn.close()
    assert all(host.task.done() for host in Host.lives)
