"""The host's half of what touches SGLang: builds its in-process ``Engine``, feeds it, and takes its outputs.

Everything whose shape differs between SGLang versions is here, or in the scheduler's half (``scheduler_main`` and
``scheduler_outputs``). None of it runs in the user's code.

Outputs are taken a step at a time (:mod:`scheduler_outputs`), past SGLang's tokenizer manager, whose work per token
makes streaming four times slower than not streaming. Where ``fast_outputs`` is off, or (with a warning) where this
SGLang has not what that needs, the public ``generate_request`` streams are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sglrollout.engine import cpu_support, scheduler_agent, scheduler_outputs
from sglrollout.engine.environment import not_for_engines, within_the_engine
from sglrollout.engine.finish_reasons import to_finish
from sglrollout.engine.scheduler_main import ignore_sigquit, note_shared_memory, run_detokenizer, run_scheduler
from sglrollout.engine.tool_calls import parse_tool_calls
from sglrollout.errors import EngineRequestError
from sglrollout.wire.messages import EncodedOutputs, EngineInfo, Finish, Generate, Launch, Load, Output, Outputs

_log = logging.getLogger("sglrollout.engine")

Emit = Callable[[Outputs | EncodedOutputs], None]

_SAMPLING_NAMES = {"seed": "sampling_seed"}
_NOT_SAMPLING = frozenset({"logprobs", "lora"})
_FORCED_END_S = 0.5
_FIRST_ANSWER_S = 120.0
_EMPTY_BYTES = memoryview(scheduler_outputs.NO_OUTPUTS).nbytes


class SGLangEngine:
    """A running ``sglang.Engine``. Build it on the thread whose event loop will serve it, and keep that thread.

    Args:
        launch: what to build.
        emit: called with each step's outputs, on the event loop.
        on_children: called with the scheduler processes as soon as they exist, so that a launch can be given up.
    """

    def __init__(
        self,
        launch: Launch,
        emit: Emit,
        on_children: Callable[[list[Any]], None] = lambda children: None,
    ) -> None:
        begun = time.monotonic()
        self.weight_version = 0
        self._paused = False
        self.warnings: list[str] = []
        self._emit, self._tasks = emit, dict[int, asyncio.Task[None]]()
        self._schedulers: list[Any] = []
        self._detokenizers: list[Any] = []
        self._steps: zmq.asyncio.Socket | None = None
        self._steps_address: str | None = None
        self._zmq = zmq.asyncio.Context()
        self._answers_address = f"ipc://{launch.scratch_dir}/answers"
        self._answers = self._zmq.socket(zmq.PULL)
        self._answers.bind(self._answers_address)
        self._scratch_dir, self._num_calls, self._call_lock = launch.scratch_dir, 0, asyncio.Lock()
        self._adapters: dict[str, Any] = {}
        """SGLang's references of LoRA adapters, by name; also of those that it may not have."""
        self._state_lock = asyncio.Lock()
        self._has_session = False
        try:
            with _process_state_kept(launch.scratch_dir):
                self._engine, self._fast = self._build(launch, on_children)
        except BaseException:
            self._zmq.destroy(linger=0)
            raise
        self._manager = self._engine.tokenizer_manager
        self._take_over()
        self._info_args = dict(launch.engine_args)
        self._start_s = time.monotonic() - begun

    # ------------------------------------------------------------ building and ending

    def _build(self, launch: Launch, on_children: Callable[[list[Any]], None]) -> tuple[Any, bool]:
        cpu = launch.engine_args.get("device") == "cpu"
        if cpu:
            os.sched_setaffinity(0, launch.cpu_cores or os.sched_getaffinity(0))
            cpu_support.enable(tp_size=int(launch.engine_args.get("tp_size", 1)))
        from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        fast = launch.fast_outputs and self._can_take_steps(Engine, TokenizerManager)
        manager_class = _letting_go(TokenizerManager, self) if fast else TokenizerManager
        if fast and launch.engine_args.get("enable_metrics"):
            self.warnings.append(
                "SGLang's metrics of its tokenizer manager stay empty: give fast_outputs=False for them"
            )
        if fast:
            self._steps_address = f"ipc://{launch.scratch_dir}/steps"
            self._steps = self._zmq.socket(zmq.PULL)
            self._steps.set_hwm(0)
            self._steps.bind(self._steps_address)
        adapter = self

        class HostedEngine(Engine):  # type: ignore[misc]
            shutdown = _no_shutdown
            run_detokenizer_process_func = staticmethod(run_detokenizer)
            run_scheduler_process_func = staticmethod(
                partial(run_scheduler, answers_to=adapter._answers_address, steps_to=adapter._steps_address)
            )

            @staticmethod
            def init_tokenizer_manager_func(server_args: Any, port_args: Any) -> Any:
                return init_tokenizer_manager(server_args, port_args, manager_class)

            @classmethod
            def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> Any:
                note_shared_memory(port_args, launch.scratch_dir)
                if fast:
                    port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
                launched = super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)
                adapter._schedulers = list(launched[1] or ())
                on_children(adapter._schedulers)
                return launched

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
                if fast:
                    return [], []
                launched = super()._launch_detokenizer_subprocesses(*args, **kwargs)
                adapter._detokenizers = list(launched[0])
                return launched

        arguments = {**launch.engine_args, "custom_sigquit_handler": ignore_sigquit}
        return HostedEngine(**arguments), fast

    def _can_take_steps(self, engine_class: Any, manager_class: Any) -> bool:
        """Whether this SGLang has what taking whole steps relies on."""
        hooks = {
            engine_class: (
                *("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"),
                *("init_tokenizer_manager_func", "run_scheduler_process_func", "run_detokenizer_process_func"),
            ),
            manager_class: ("_handle_abort_req", "generate_request", "abort_request"),
        }
        missing = [name for owner, names in hooks.items() for name in names if not hasattr(owner, name)]
        if not missing and scheduler_outputs.can_replace():
            return True
        self.warnings.append(
            f"this SGLang lacks {missing or 'the output streamer'} as it is known here: outputs take the public path, "
            "and streaming is several times slower"
        )
        return False

    def _take_over(self) -> None:
        """Take from SGLang what it would do to this process: its watchdog and signal handlers.

        As its exit hook, which ``_no_shutdown`` replaces, they end with killing every child of the process.
        """
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self._manager.signal_handler_class = _QuietSignals

    @property
    def processes(self) -> dict[str, Any]:
        """SGLang's processes by name, for instance ``scheduler 0``."""
        named = {f"scheduler {i}": process for i, process in enumerate(self._schedulers)}
        return named | {f"detokenizer {i}": process for i, process in enumerate(self._detokenizers)}

    def close(self) -> None:
        """End SGLang's processes, and only those. Blocks until they are gone, a second for each at most."""
        sender = getattr(self._engine, "send_to_rpc", None)
        if sender is not None:
            sender.close(linger=0)
        self._zmq.destroy(linger=0)
        end_processes(list(self.processes.values()), set(self._engine.get_all_child_pids()))

    async def info(self) -> EngineInfo:
        """What the engine says of itself. The first call to SGLang: it binds to the loop that runs this.

        Raises:
            TimeoutError: SGLang does not answer, or its scheduler does not send steps.
        """
        if self._steps is not None:
            await asyncio.wait_for(self._steps.recv(), _FIRST_ANSWER_S)
        manager, args = self._manager, self._engine.server_args
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        (state,) = await asyncio.wait_for(manager.get_internal_state(), _FIRST_ANSWER_S)
        model = manager.model_config
        import sglang

        return EngineInfo(
            sglang_version=sglang.__version__,
            pid=os.getpid(),
            child_pids=sorted(self._engine.get_all_child_pids()),
            context_length=int(model.context_len),
            max_prompt_tokens=int(scheduler["max_req_input_len"]),
            vocab_size=int(model.vocab_size),
            max_running_requests=int(state.get("effective_max_running_requests_per_dp") or 0),
            max_total_tokens=int(scheduler["max_total_num_tokens"]),
            eos_token_ids=sorted(model.hf_eos_token_id or ()),
            fast_outputs=self._fast,
            deterministic=bool(self._info_args.get("enable_deterministic_inference")),
            has_tokenizer=not args.skip_tokenizer_init,
            memory_saver=bool(self._info_args.get("enable_memory_saver")),
            keeps_weights=bool(self._info_args.get("enable_weights_cpu_backup")),
            tp_size=len(self._schedulers),
            lora=bool(getattr(manager, "enable_lora", False)),
            lora_rank=int(getattr(args, "max_lora_rank", None) or 0),
            weight_version=self.weight_version,
            start_s=self._start_s,
            warnings=self.warnings,
        )

    # ------------------------------------------------------------ requests

    @property
    def num_inflight(self) -> int:
        return len(self._tasks)

    def submit(self, request: Generate) -> None:
        """Start one request. Its outputs, and its end, go to ``emit``."""
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda task: self._served(request.request_id, task))

    def _served(self, request_id: int, task: asyncio.Task[None]) -> None:
        del self._tasks[request_id]
        if task.cancelled():  # before its first step, so that nothing in it has run
            self._emit_end(request_id, Finish("abort", message="aborted before it began"))

    def abort(self, request_id: int) -> None:
        """Drop one request; it still ends through ``emit``, within half a second."""
        task = self._tasks.get(request_id)
        if task is None:
            return
        if _rid(request_id) not in self._manager.rid_to_state:
            task.cancel("aborted before it began")
            return
        self._manager.abort_request(rid=_rid(request_id))
        asyncio.get_running_loop().call_later(_FORCED_END_S, self._force_end, request_id)

    def _force_end(self, request_id: int) -> None:
        """For a request that the scheduler does not know yet, so that its abort found nothing."""
        task = self._tasks.get(request_id)
        if task is not None:
            self._manager.abort_request(rid=_rid(request_id))
            task.cancel("aborted")

    async def _serve(self, request: Generate) -> None:
        """One request's life in SGLang. With step outputs the loop body sees the end only."""
        sent = 0
        try:
            async for out in self._manager.generate_request(_generate_request(request), None):
                if not self._fast:
                    sent = self._emit_public(request, out, sent)
        except asyncio.CancelledError:
            self._emit_end(request.request_id, Finish("abort", message="aborted before the scheduler had it"))
        except Exception as error:
            message = f"{type(error).__name__}: {getattr(error, 'detail', None) or error}"
            self._emit_end(request.request_id, Finish("error", message=message))

    async def forward_steps(self) -> None:
        """Take the scheduler's steps and forward them, for ever."""
        if self._steps is None:
            return
        decode = msgspec.msgpack.Decoder(scheduler_outputs.Step).decode
        while True:
            step = decode(await self._steps.recv())
            for rid in step.ended:
                self._manager.let_go(rid)
            if memoryview(step.outputs).nbytes > _EMPTY_BYTES:
                self._emit(EncodedOutputs(step.weight_version, step.outputs))

    def _emit_end(self, request_id: int, finish: Finish) -> None:
        self._emit(Outputs(self.weight_version, [Output(request_id, [], None, finish)]))

    def _emit_public(self, request: Generate, out: dict[str, Any], sent: int) -> int:
        """Forward what is new in one item of a public stream, which repeats all tokens so far."""
        meta, ids = out["meta_info"], out["output_ids"]
        logprobs = None
        if request.sampling.get("logprobs", True):
            logprobs = [value for value, _, _ in meta.get("output_token_logprobs", ())[sent : len(ids)]]
        reason = meta.get("finish_reason")
        finish = to_finish(reason, meta.get("prompt_tokens", 0), meta.get("cached_tokens", 0)) if reason else None
        self._emit(Outputs(self.weight_version, [Output(request.request_id, list(ids[sent:]), logprobs, finish)]))
        return len(ids)

    # ------------------------------------------------------------ control

    def load(self) -> Load:
        """The scheduler's last load snapshot."""
        reader = getattr(self._manager, "load_snapshot_reader", None)
        snapshots = reader.read_all() if reader is not None else []
        if not snapshots:
            return Load(self.num_inflight, 0, 0, 0.0, 0.0, 0.0)
        last = snapshots[0]
        return Load(
            num_inflight=self.num_inflight,
            num_running=last.num_running_reqs,
            num_waiting=last.num_waiting_reqs,
            kv_usage=float(last.token_usage),
            cache_hit_rate=float(last.cache_hit_rate),
            tokens_per_s=float(last.gen_throughput),
            published_s=float(getattr(last, "timestamp", 0.0)),
        )

    async def flush_cache(self, timeout_s: float) -> None:
        """Empty the prefix cache, once no request runs, within ``timeout_s``.

        Raises:
            EngineRequestError: SGLang refused: requests still run.
        """
        if self._paused:
            answers = await self.call_schedulers("flush", timeout_s)
            flushed, message = all(answers), ""
        else:
            result = await self._manager.flush_cache(timeout_s=timeout_s)
            flushed, message = result.success, result.message
        if not flushed:
            raise EngineRequestError("engine", f"SGLang did not flush its cache: {message or 'requests are running'}")

    async def pause(self, mode: str, timeout_s: float) -> bool:
        """Stop generating. What is submitted from here on waits.

        Args:
            mode: ``abort`` ends what runs, with its tokens so far; ``retract`` frees its KV cache and lets it begin
                again from its tokens; ``in_place`` keeps it, KV cache and all.
            timeout_s: for ``abort``: how long ends may take.

        Returns:
            whether a trainer is attached to every TP rank, and parameters are where they were when it was.

        Raises:
            TimeoutError: requests did not end in time, or the scheduler did not answer.
        """
        async with self._state_lock:
            return await self._pause(mode, timeout_s)

    async def _pause(self, mode: str, timeout_s: float) -> bool:
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True
        self._paused = True
        if mode == "abort":
            await asyncio.wait_for(self._abort_all(), timeout_s)
            mode = "retract"  # of nothing: so that the scheduler, too, takes no step
        return all(await self.call_schedulers("pause", timeout_s, {"mode": mode}))

    async def _abort_all(self) -> None:
        for request_id in list(self._tasks):
            self.abort(request_id)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def resume(self, version: int, flush: bool, timeout_s: float) -> list[dict[str, float]]:
        """Generate again, after emptying the prefix cache if ``flush``. Tokens from here on are of ``version``.

        Returns:
            the seconds that both took, by TP rank.

        Raises:
            EngineRequestError: the cache was not emptied; it stays paused.
        """
        async with self._state_lock:  # a pause that nobody waits for any more is over first
            seconds = await self.call_schedulers("resume", timeout_s, {"version": version, "flush": flush})
            self.weight_version = version
            self._paused = False
            async with self._manager.is_pause_cond:
                self._manager.is_pause = False
                self._manager.is_pause_cond.notify_all()
            return seconds

    async def begin_portable(self) -> None:
        """Open SGLang's own weight update, where this version has such a session.

        Raises:
            EngineRequestError: SGLang refused.
        """
        if hasattr(self._manager, "begin_weight_update"):
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            if self._has_session:  # of a sync that failed in the middle
                await self.end_portable()
            self._has_session = True
            _check("begin_weight_update", await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))

    async def load_portable(self, payloads: list[bytes]) -> None:
        """One bucket in SGLang's own ``flattened_bucket`` format: a payload for each TP rank."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format="flattened_bucket", flush_cache=False
        )
        _check("update_weights_from_tensor", await self._manager.update_weights_from_tensor(request))

    async def end_portable(self) -> None:
        """Close SGLang's own weight update."""
        if hasattr(self._manager, "end_weight_update"):
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            self._has_session = False
            _check("end_weight_update", await self._manager.end_weight_update(EndWeightUpdateReqInput()))

    async def sleep(self, tags: list[str], timeout_s: float) -> None:
        """Give the memory behind ``tags`` back to the device. What still runs ends first; it stays paused."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        async with self._state_lock:
            await self._pause("abort", timeout_s)  # a scheduler that is not idle would end itself
            request = ReleaseMemoryOccupationReqInput(tags=tags)
            await asyncio.wait_for(self._manager.release_memory_occupation(request, None), timeout_s)

    async def wake(self, tags: list[str], timeout_s: float) -> None:
        """Take the memory behind ``tags`` again. Weights come back as garbage. It stays paused."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        async with self._state_lock:
            request = ResumeMemoryOccupationReqInput(tags=tags)
            await asyncio.wait_for(self._manager.resume_memory_occupation(request, None), timeout_s)

    def parse_tool_calls(self, text: str, tools: list[dict[str, Any]], parser: str, timeout_s: float) -> dict[str, Any]:
        """Tool calls in a text, by SGLang's parser of that name. Blocks: the first call imports them all."""
        return parse_tool_calls(text, tools, parser, self._manager.tokenizer, timeout_s)

    async def load_adapter(self, name: str, folder: str, config: dict[str, Any], within_s: float) -> None:
        """Have a LoRA adapter, in place of one of the same name, which running requests go on with, too."""
        from sglang.srt.lora.lora_registry import LoRARef

        registry = self._manager.lora_registry
        reference = self._adapters.setdefault(name, LoRARef(lora_name=name, lora_path=folder))
        arguments = {"name": name, "lora_id": reference.lora_id, "folder": folder, "config": config}
        await self.call_schedulers("load_adapter", within_s, arguments)
        if name not in registry.get_all_adapters():
            await registry.register(reference)
            self._manager.lora_ref_cache[name] = reference

    async def call_schedulers(self, method: str, within_s: float, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Run a method of the agent in every TP rank, between two steps.

        Returns:
            the answers, in TP rank order.

        Raises:
            EngineRequestError: it failed in one of them.
            TimeoutError: one did not answer.
        """
        from sglang.srt.managers.io_struct import RpcReqInput

        async with self._call_lock:
            self._num_calls += 1
            number, path = self._num_calls, os.path.join(self._scratch_dir, f"call-{self._num_calls}")
            call = scheduler_agent.Call(number, method, arguments or {})
            _write(path, msgspec.msgpack.encode(call))
            try:
                self._drop_late_replies()
                sock_send, _ = _pickled_messages()
                sock_send(
                    self._engine.send_to_rpc, RpcReqInput(method=scheduler_agent.METHOD, parameters={"path": path})
                )
                answers = await asyncio.wait_for(self._answers_to(number), within_s)
            except TimeoutError:
                raise TimeoutError(f"{method} was not answered by every TP rank within {within_s:.3g} s") from None
            finally:
                os.unlink(path)
        failed = [f"TP rank {answer.tp_rank}: {answer.error}" for answer in answers if answer.error]
        if failed:
            raise EngineRequestError("engine", "; ".join(failed))
        return [answer.value for answer in answers]

    async def _answers_to(self, number: int) -> list[scheduler_agent.Answer]:
        answers: list[scheduler_agent.Answer] = []
        while len(answers) < len(self._schedulers):
            answer = msgspec.msgpack.decode(await self._answers.recv(), type=scheduler_agent.Answer)
            if answer.number == number:  # else late, of a call that was given up
                answers.append(answer)
        return sorted(answers, key=lambda answer: answer.tp_rank)

    def _drop_late_replies(self) -> None:
        """SGLang answers each call too, with less than the agents say; nobody waits for that."""
        _, sock_recv = _pickled_messages()
        with contextlib.suppress(zmq.Again):
            while True:
                sock_recv(self._engine.send_to_rpc, zmq.NOBLOCK)


def _pickled_messages() -> tuple[Any, Any]:
    """SGLang's own way to send an object to its scheduler, and to take one."""
    from sglang.srt.managers.io_struct import sock_recv, sock_send

    return sock_send, sock_recv


def _check(name: str, result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise EngineRequestError("engine", f"SGLang refused {name}: {message}")


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _no_shutdown(self: Any) -> None:
    """In place of ``Engine.shutdown``, which SIGKILLs every child of the process, and runs at its exit."""


def end_processes(processes: list[Any], pids: set[int]) -> None:
    """Kill and reap ``processes``, and kill the other ``pids``."""
    for pid in pids | {process.pid for process in processes}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.join(timeout=1.0)


def _rid(request_id: int) -> str:
    """Fixed width: SGLang aborts every request whose id *starts with* the one given."""
    return f"{request_id:016x}"


def _generate_request(request: Generate) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {
        _SAMPLING_NAMES.get(name, name): value for name, value in request.sampling.items() if name not in _NOT_SAMPLING
    }
    if request.chunk_tokens:
        sampling["stream_interval"] = request.chunk_tokens
    return GenerateReqInput(
        rid=_rid(request.request_id),
        input_ids=request.prompt_ids,
        sampling_params=sampling,
        return_logprob=bool(request.sampling.get("logprobs", True)),
        logprob_start_len=-1,
        stream=bool(request.chunk_tokens),
        lora_path=request.sampling.get("lora"),
    )


def _letting_go(manager_class: Any, adapter: SGLangEngine) -> Any:
    """A tokenizer manager whose requests end when a step says so, as they do in SGLang's own output handler."""

    class _TokenizerManager(manager_class):  # type: ignore[misc]
        def let_go(self, rid: str) -> None:
            """End the request's ``generate_request``."""
            state = self.rid_to_state.pop(rid, None)
            if state is None:
                return
            state.finished = True
            state.out_list.append({"meta_info": {}})
            state.event.set()
            if self.enable_lora and state.obj.lora_path:
                release = asyncio.ensure_future(self.lora_registry.release(state.obj.lora_id))
                self.asyncio_tasks.add(release)
                release.add_done_callback(self.asyncio_tasks.discard)

        def _handle_abort_req(self, recv_obj: Any) -> None:
            """The scheduler dropped a request that it had not run yet; there is no step that would say so."""
            known = recv_obj.rid in self.rid_to_state
            try:
                super()._handle_abort_req(recv_obj)
            except Exception:  # SGLang would answer it by killing every process of the tree
                _log.exception("SGLang's handling of an abort failed")
                self.let_go(recv_obj.rid)
            if known and recv_obj.rid not in self.rid_to_state:
                reason = recv_obj.finished_reason or {"type": "abort", "message": "aborted while it waited"}
                adapter._emit_end(int(recv_obj.rid, 16), to_finish(reason))

    return _TokenizerManager


class _QuietSignals:
    """Signal handlers for SGLang to install in place of its own, which kill the process tree.

    The host sees a dead scheduler by its sentinel and the end of its client by the channel: nothing is left to do here.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        pass

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        """Nothing: a preemption signals every process of a job, and engines must outlive the trainer's last steps."""

    def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
        pass


@contextlib.contextmanager
def _process_state_kept(scratch_dir: str) -> Iterator[None]:
    """Build with the environment a host needs, and undo what importing and building SGLang does to the process.

    That is: loop policy, start method, environment, GC. In a host process nobody would mind; with
    ``isolation="thread"`` it is the user's process.
    """
    policy = asyncio.get_event_loop_policy()
    method = multiprocessing.get_start_method(allow_none=True)
    thresholds, temporary = gc.get_threshold(), tempfile.tempdir
    removed = {name: os.environ.pop(name) for name in not_for_engines(os.environ)}
    environment = dict(os.environ)
    try:
        tempfile.tempdir = scratch_dir
        os.environ.update(within_the_engine(scratch_dir))
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
        gc.set_threshold(*thresholds)
        tempfile.tempdir = temporary
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment | removed)
