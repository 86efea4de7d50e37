"""The engine host: owns one SGLang engine and answers its client's messages.

``python -m sglrollout.engine.host FD CLIENT_PID SCRATCH_DIR`` is the process form: the leader of a session of its own,
so that a Ctrl-C in the user's terminal does not reach it, and ending its process group ends all that SGLang started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from sglrollout.engine import collector
from sglrollout.engine.orphan_watch import CHECK_S, OrphanWatch
from sglrollout.engine.scratch import remove_scratch
from sglrollout.engine.sglang_adapter import SGLangEngine
from sglrollout.version import __version__
from sglrollout.wire.channel import Channel, host_channel
from sglrollout.wire.messages import (
    HOST_ALONE,
    PROTOCOL,
    Abort,
    Command,
    Died,
    EncodedOutputs,
    Generate,
    Hello,
    Launch,
    LaunchFailed,
    Outputs,
    Reply,
    SentByHost,
    Stop,
    ToHost,
)

_LOAD_INTERVAL_S = 0.25
_GRACE_S = 5.0
_PART_BYTES = 256 << 20
"""Of weights that are copied from engine to engine: so much between two steps."""


class EngineHost:
    """Serves one engine over one channel until told to stop, the client goes away, or the engine dies."""

    def __init__(
        self,
        channel: Channel[ToHost, SentByHost],
        on_children: Callable[[list[Any]], None],
        on_started: Callable[[], None],
    ) -> None:
        self._channel, self._on_children, self._on_started = channel, on_children, on_started
        self._built: SGLangEngine | None = None
        self._over = anyio.Event()
        self._stopped = False
        self._tasks: TaskGroup

    async def serve(self) -> None:
        """The host's whole life."""
        await self._channel.handshake(Hello(PROTOCOL, os.getpid(), __version__))
        launch = await self._channel.receive()
        if not isinstance(launch, Launch):
            return
        try:
            self._built = SGLangEngine(launch, self._emit, self._on_children)
            info = await self._engine.info()
        except BaseException as error:
            self._channel.send(LaunchFailed(f"{type(error).__name__}: {error}"))
            await self._channel.drain()
            raise
        self._channel.send(info)
        self._on_started()
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._receive)
            self._tasks.start_soon(self._engine.forward_steps)
            self._tasks.start_soon(self._report_load)
            self._watch_processes()
            await self._over.wait()
            self._tasks.cancel_scope.cancel()

    async def run(self) -> bool:
        """Serve, then end the engine whatever happened. Returns whether the client asked for the end."""
        try:
            await self.serve()
            return self._stopped
        finally:
            if self._built is not None:
                self._built.close()
            await self._channel.close()

    @property
    def _engine(self) -> SGLangEngine:
        assert self._built is not None
        return self._built

    async def _receive(self) -> None:
        engine = self._engine
        while (message := await self._channel.receive()) is not None:
            match message:
                case Generate():
                    engine.submit(message)
                case Abort():
                    for request_id in message.request_ids:
                        engine.abort(request_id)
                case Command():
                    self._tasks.start_soon(self._command, message)
                case Stop():
                    self._stopped = True
                    break
        self._over.set()

    async def _command(self, command: Command) -> None:
        try:
            value = await getattr(self, f"_on_{command.name}")(**command.arguments)
            self._channel.send(Reply(command.command_id, value=value))
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and command.name != HOST_ALONE
            self._channel.send(Reply(command.command_id, f"{type(error).__name__}: {error}", timed_out))

    async def _on_flush_cache(self, timeout_s: float) -> dict[str, Any]:
        await self._engine.flush_cache(timeout_s)
        return {}

    async def _on_pause(self, mode: str, timeout_s: float) -> dict[str, Any]:
        return {"attached": await self._engine.pause(mode, timeout_s)}

    async def _on_resume(self, version: int, flush: bool, timeout_s: float) -> dict[str, Any]:
        return {"ranks": await self._engine.resume(version, flush, timeout_s)}

    async def _on_describe_weights(self, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        return {"reports": await self._engine.call_schedulers("describe", timeout_s, arguments)}

    async def _on_attach_weights(self, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        await self._engine.call_schedulers("attach", timeout_s + _GRACE_S, {**arguments, "timeout_s": timeout_s})
        return {}

    async def _on_detach_weights(self, timeout_s: float) -> dict[str, Any]:
        await self._engine.call_schedulers("detach", timeout_s)
        return {}

    async def _on_load_weights(self, timeout_s: float) -> dict[str, Any]:
        return {"ranks": await self._engine.call_schedulers("load", timeout_s + _GRACE_S, {"timeout_s": timeout_s})}

    async def _on_begin_portable(self, timeout_s: float) -> dict[str, Any]:
        await asyncio.wait_for(self._engine.begin_portable(), timeout_s)
        return {}

    async def _on_load_portable(self, payloads: list[bytes], timeout_s: float) -> dict[str, Any]:
        await asyncio.wait_for(self._engine.load_portable(payloads), timeout_s)
        return {}

    async def _on_end_portable(self, timeout_s: float) -> dict[str, Any]:
        await asyncio.wait_for(self._engine.end_portable(), timeout_s)
        return {}

    async def _on_checksum_weights(self, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        return {"ranks": await self._engine.call_schedulers("checksum", timeout_s, arguments)}

    async def _on_weights_size(self, timeout_s: float) -> dict[str, Any]:
        return {"num_bytes": sum(await self._engine.call_schedulers("weights_size", timeout_s))}

    async def _on_export_weights(self, timeout_s: float) -> dict[str, Any]:
        """Write the weights into anonymous files, and hold them until told to drop them; the engine serves on."""
        begun = await self._copy("begin_export", timeout_s)
        ranks = [{"pid": rank["pid"], "fd": rank["fd"]} for rank in begun]
        return {"version": self._engine.weight_version, "ranks": ranks}

    async def _on_drop_export(self, timeout_s: float) -> dict[str, Any]:
        await self._engine.call_schedulers("end_copy", timeout_s)
        return {}

    async def _on_adopt_weights(self, paths: list[str], timeout_s: float) -> dict[str, Any]:
        try:
            await self._copy("begin_adoption", timeout_s, {"paths": paths})
        finally:
            await self._engine.call_schedulers("end_copy", timeout_s)
        return {}

    async def _on_load_adapter(
        self, adapter: str, folder: str, config: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        await self._engine.load_adapter(adapter, folder, config, timeout_s)
        return {}

    async def _copy(self, begin: str, timeout_s: float, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Begin, and go on part by part; what every TP rank answered to the beginning."""
        begun = await self._engine.call_schedulers(begin, timeout_s, arguments)
        part = {"number": begun[0]["number"], "num_bytes": _PART_BYTES}
        deadline = time.monotonic() + timeout_s
        while not all(await self._engine.call_schedulers("copy_part", timeout_s, part)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the weights were not copied within {timeout_s:g} s")
        return begun

    async def _on_sleep(self, tags: list[str], timeout_s: float) -> dict[str, Any]:
        await self._engine.call_schedulers("end_copy", timeout_s)  # which would read what is given up
        await self._engine.sleep(tags, timeout_s)
        return {}

    async def _on_wake(self, tags: list[str], timeout_s: float) -> dict[str, Any]:
        await self._engine.wake(tags, timeout_s)
        return {}

    async def _on_memory(self, timeout_s: float) -> dict[str, Any]:
        return {"ranks": await self._engine.call_schedulers("memory", timeout_s)}

    async def _on_parse_tool_calls(
        self, text: str, tools: list[dict[str, Any]], parser: str, timeout_s: float
    ) -> dict[str, Any]:
        parsing = asyncio.to_thread(self._engine.parse_tool_calls, text, tools, parser, timeout_s)
        return await asyncio.wait_for(parsing, timeout_s)

    def _emit(self, outputs: Outputs | EncodedOutputs) -> None:
        self._channel.send(outputs)

    async def _report_load(self) -> None:
        """Tell the client the load, as long as there is any or it changed."""
        last = None
        while True:
            load = self._engine.load()
            if load.num_inflight or last is None or not load.says_the_same_as(last):
                self._channel.send(load)
                last = load
            await anyio.sleep(_LOAD_INTERVAL_S)

    def _watch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        for name, process in self._engine.processes.items():
            loop.add_reader(process.sentinel, self._on_process_end, name, process)

    def _on_process_end(self, name: str, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._give_up(f"{name} ended unasked, with exit code {process.exitcode}")

    def _give_up(self, reason: str) -> None:
        if not self._over.is_set():
            self._channel.send(Died(reason))
            self._over.set()


def serve_socket(
    sock: socket.socket,
    on_children: Callable[[list[Any]], None] = lambda children: None,
    on_started: Callable[[], None] = lambda: None,
) -> bool:
    """Run a host on this thread until it is over. The thread form of a host calls this directly.

    Args:
        sock: its end of the channel.
        on_children: called with the scheduler processes as soon as they exist.
        on_started: called once the engine is up.

    Returns:
        whether the client asked it to stop; otherwise the channel ended, or the engine did.
    """

    async def main() -> bool:
        return await EngineHost(await host_channel(sock), on_children, on_started).run()

    return anyio.run(main, backend="asyncio", backend_options={"loop_factory": _loop_factory()})


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def main() -> None:
    """Entry point of a host process."""
    collector.importing()
    fd, client_pid, scratch_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(fd, False)
    watch = OrphanWatch(client_pid, scratch_dir)
    watch.start()
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, whose end is the engine's end
        signal.signal(number, signal.SIG_IGN)
    stopped = serve_socket(socket.socket(fileno=fd), on_started=collector.imported)
    if stopped:
        remove_scratch(scratch_dir)  # the client does too, unless it is interrupted on the way out
    elif watch.orphaned.wait(2 * CHECK_S):
        watch.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is closed; tearing down the interpreter with torch in it takes a second


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that SGLang spawns, which imports SGLang next
    collector.importing()
