from __future__ import annotations

import asyncio
import socket

import anyio

from sglrollout.engine.client import EngineClient
from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.channel import client_channel
from sglrollout.wire.messages import Launch

MORE_THAN_A_SOCKET_HOLDS = [1] * 2_000_000


class GoneHost:
    """A host that has ended, as its launcher tells of it."""

    def log_tail(self, num_lines: int) -> str:
        return "killed"

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
