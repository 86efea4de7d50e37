from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import anyio
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sglrollout
from sglrollout.engine.host import EngineHost
from sglrollout.engine.remote_commands import Commands
from sglrollout.errors import ChannelError
from sglrollout.wire import channel as channel_module
from sglrollout.wire.channel import Channel, client_channel, host_channel
from sglrollout.wire.messages import (
    PROTOCOL,
    Abort,
    CommandName,
    Died,
    FromHost,
    Generate,
    Hello,
    Output,
    Outputs,
    RemoteCommandName,
    Reply,
    SentByHost,
    Stop,
    ToHost,
)

HELLO = Hello(PROTOCOL, 1, "0.0")

Client = Channel[FromHost, ToHost]
Host = Channel[ToHost, SentByHost]


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[Client, Host]]:
    ours, theirs = socket.socketpair()
    client, host = await client_channel(ours), await host_channel(theirs)
    try:
        with anyio.fail_after(20):
            yield client, host
    finally:
        await client.close()
        await host.close()


@asynccontextmanager
async def host_and_raw() -> AsyncIterator[tuple[Host, socket.socket]]:
    """A host's channel, and a bare socket in the client's place."""
    ours, theirs = socket.socketpair()
    host = await host_channel(theirs)
    try:
        with ours, anyio.fail_after(20):
            yield host, ours
    finally:
        await host.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def packed(message: Any) -> bytes:
    return frame(msgspec.msgpack.encode(message))


# ------------------------------------------------------------ messages


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type, as msgpack can carry them."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=20),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        NoneType: st.none(),
        Any: st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
    }
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in simple:
        return simple[kind]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=4)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    assert issubclass(kind, msgspec.Struct), f"no values for a field of {kind}"
    return st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize("kind", get_args(ToHost), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_message_to_a_host_arrives_as_it_was_sent(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(kind))

    async def check() -> None:
        async with both_ends() as (client, host):
            client.send(message)
            assert await host.receive() == message

    asyncio.run(check())


@pytest.mark.parametrize("kind", get_args(FromHost), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_message_from_a_host_arrives_as_it_was_sent(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(kind))

    async def check() -> None:
        async with both_ends() as (client, host):
            host.send(message)
            assert await client.receive() == message

    asyncio.run(check())


def test_no_two_messages_of_a_direction_have_the_same_tag() -> None:
    for union in (ToHost, FromHost):
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert len(set(tags)) == len(tags)


# ------------------------------------------------------------ frames


async def test_messages_arrive_in_order_and_whole_however_large() -> None:
    async with both_ends() as (client, host):
        sent = [Generate(i, list(range(i * 10_000)), {}, 8) for i in range(20)]

        async def send() -> None:
            for message in sent:
                client.send(message)
                await client.drain()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            received = [await host.receive() for _ in sent]
        assert received == sent


async def test_both_ends_may_send_at_once() -> None:
    async with both_ends() as (client, host):
        client.send(Stop())
        host.send(Died("x"))
        assert await host.receive() == Stop()
        assert await client.receive() == Died("x")


async def test_a_frame_may_arrive_a_byte_at_a_time() -> None:
    async with host_and_raw() as (host, raw):
        received = asyncio.ensure_future(host.receive())
        for byte in packed(Abort([1, 2, 3])):
            assert not received.done()
            raw.sendall(bytes([byte]))
            await asyncio.sleep(0.001)
        assert await received == Abort([1, 2, 3])


async def test_two_frames_may_arrive_in_one_piece() -> None:
    async with host_and_raw() as (host, raw):
        raw.sendall(packed(Abort([1])) + packed(Abort([2])) + packed(Stop())[:3])
        assert [await host.receive(), await host.receive()] == [Abort([1]), Abort([2])]


@pytest.mark.parametrize("cut", range(10))
async def test_a_frame_that_breaks_off_is_the_end_of_the_stream(cut: int) -> None:
    async with host_and_raw() as (host, raw):
        raw.sendall(packed(Abort([1, 2, 3]))[:cut])
        raw.close()
        assert await host.receive() is None
        assert await host.receive() is None


async def test_a_frame_that_announces_too_many_bytes_is_refused_before_they_come() -> None:
    async with host_and_raw() as (host, raw):
        raw.sendall(struct.pack("<I", channel_module.MAX_FRAME_BYTES + 1))
        with pytest.raises(ChannelError, match="announces 1073741825 bytes"):
            await host.receive()


async def test_a_message_over_the_frame_limit_is_refused_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 100)
    async with both_ends() as (client, host):
        with pytest.raises(ChannelError, match="over the 100-byte frame limit"):
            client.send(Generate(1, list(range(200)), {}, 0))
        client.send(Abort([1]))
        assert await host.receive() == Abort([1])


GARBAGE = {
    "no bytes": b"",
    "not msgpack": b"\xc1",
    "not a map": msgspec.msgpack.encode([1, 2, 3]),
    "a map without a tag": msgspec.msgpack.encode({"request_ids": [1]}),
    "an unknown tag": msgspec.msgpack.encode({"type": "no such"}),
    "a message of the other direction": msgspec.msgpack.encode(Died("x")),
    "a missing field": msgspec.msgpack.encode({"type": "abort"}),
    "a field of another type": msgspec.msgpack.encode({"type": "abort", "request_ids": "x"}),
    "bytes after the message": msgspec.msgpack.encode(Stop()) + b"\x00",
    "text that is not UTF-8": b"\x82\xa4type\xa5hello\xa8protocol\xa2\xff\xfe",
    "a tag that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "values nested without end": b"\x81\xa1x" + b"\x91" * 100_000,
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
async def test_what_is_not_a_message_is_a_channel_error(body: bytes) -> None:
    async with host_and_raw() as (host, raw):
        sending = asyncio.ensure_future(asyncio.to_thread(raw.sendall, frame(body)))
        with pytest.raises(ChannelError, match=rf"not a message of protocol {PROTOCOL}"):
            await host.receive()
        await sending


async def test_free_values_nested_without_end_are_a_channel_error() -> None:
    async with both_ends() as (client, host):
        body = msgspec.msgpack.encode(Reply(1, value={"x": 0}))
        assert body.endswith(b"\x00")
        host._writer.write(frame(body[:-1] + b"\x91" * 50_000 + b"\x00"))
        with pytest.raises(ChannelError):
            await client.receive()


PREFIXES = [msgspec.msgpack.encode(Reply(1, value={"x": 0}))[:-1], msgspec.msgpack.encode(Hello(1, 2, ""))[:-1], b""]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PREFIXES), st.binary(max_size=80))
@example(PREFIXES[0], b"\x81\x81\x01\x02\x03")
@example(PREFIXES[0], b"\xa1\xff")
@example(PREFIXES[0], b"\xc7\x0c\xff" + b"\xff" * 12)
def test_random_bodies_are_messages_or_channel_errors(prefix: bytes, body: bytes) -> None:
    async def check() -> None:
        async with both_ends() as (client, host):
            host._writer.write(frame(prefix + body))
            with suppress(ChannelError):
                assert isinstance(await client.receive(), get_args(FromHost))

    asyncio.run(check())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_end_in_a_channel_error_or_in_the_end_of_the_stream(stream: bytes) -> None:
    async def check() -> None:
        async with host_and_raw() as (host, raw):
            raw.sendall(stream)
            raw.close()
            try:
                while (message := await host.receive()) is not None:
                    assert isinstance(message, get_args(ToHost))
            except ChannelError:
                pass

    asyncio.run(check())


# ------------------------------------------------------------ the other end


async def test_the_handshake_gives_each_end_the_others_hello() -> None:
    async with both_ends() as (client, host):
        results: dict[str, Hello] = {}

        async def shake(name: str, end: Channel[Any, Any]) -> None:
            results[name] = await end.handshake(Hello(PROTOCOL, os.getpid(), name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shake, "client", client)
            tasks.start_soon(shake, "host", host)
        assert results["client"].library_version == "host"
        assert results["host"].library_version == "client"


async def test_another_protocol_is_refused_with_both_versions_in_the_message() -> None:
    async with both_ends() as (client, host):
        host.send(Hello(PROTOCOL + 1, 4711, "9.9"))
        with pytest.raises(ChannelError) as caught:
            await client.handshake(Hello(PROTOCOL, 1, "0.1"))
        for part in ("9.9", "4711", f"protocol {PROTOCOL + 1}", "0.1", f"speaks {PROTOCOL}"):
            assert part in str(caught.value)


@pytest.mark.parametrize("wrong", [Outputs(0, [Output(1, [2], None)]), None])
async def test_a_handshake_needs_a_hello(wrong: Outputs | None) -> None:
    async with both_ends() as (client, host):
        if wrong is None:
            await host.close()
        else:
            host.send(wrong)
        with pytest.raises(ChannelError, match="expected a hello, got"):
            await client.handshake(HELLO)


async def test_the_end_of_the_peer_ends_a_receive_that_waits() -> None:
    async with both_ends() as (client, host):
        received = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0)
        await host.close()
        assert await received is None


async def test_what_was_sent_before_the_end_still_arrives() -> None:
    async with both_ends() as (client, host):
        host.send(Died("last words"))
        await host.close()
        assert await client.receive() == Died("last words")
        assert await client.receive() is None


async def test_the_kernel_tells_when_the_peers_process_is_killed() -> None:
    ours, theirs = socket.socketpair()
    client = await client_channel(ours)
    process = await asyncio.create_subprocess_exec("sleep", "60", pass_fds=[theirs.fileno()])
    theirs.close()
    received = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0.02)
    assert not received.done()
    process.kill()
    with anyio.fail_after(5):
        assert await received is None
    await process.wait()
    await client.close()


async def test_sending_to_a_dead_peer_does_nothing_or_is_a_channel_error() -> None:
    async with both_ends() as (client, host):
        await host.close()
        for _ in range(3):
            client.send(Generate(1, list(range(1000)), {}, 0))
            with suppress(ChannelError):
                await client.drain()
            await asyncio.sleep(0.01)
        assert await client.receive() is None


async def test_sending_on_a_closed_channel_does_nothing() -> None:
    async with both_ends() as (client, host):
        await client.close()
        client.send(Stop())
        await client.close()
        assert await host.receive() is None


def test_every_command_has_its_name_on_the_wire_and_a_method_in_the_host() -> None:
    """A name that is not there would not be refused: the host could not read the message, and would end."""
    names = set(get_args(CommandName))
    methods = {name.removeprefix("_on_") for name in vars(EngineHost) if name.startswith("_on_")}
    assert methods - {"process_end"} == names
    sources = [path.read_text(encoding="utf-8") for path in Path(sglrollout.__file__).parent.rglob("*.py")]
    called = {name for source in sources for name in re.findall(r"\.command\(\s*\"(\w+)\"", source)}
    assert "export_weights" in called
    remote = set(get_args(RemoteCommandName))
    assert remote <= {name.removeprefix("_on_") for name in vars(Commands)}
    assert called <= names | remote
