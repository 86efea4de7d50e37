"""Inside SGLang's scheduler: what an engine host can ask of each TP rank beyond SGLang's own messages.

SGLang runs a method of its scheduler by name on every TP rank (``RpcReqInput``), between two steps of the event loop,
and survives what it raises. :func:`install` adds one such method, which runs an :class:`Agent`'s. Arguments come in a
file, since SGLang logs what comes with the call; answers go to a socket of the host, one from every TP rank.
"""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sglrollout.boxes import Box, narrowed
from sglrollout.engine import scheduler_outputs
from sglrollout.wire.messages import WeightReport, WeightSpec

METHOD = "sglrollout_call"


class Call(msgspec.Struct):
    """``method`` of the agent, with arguments."""

    number: int
    method: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct):
    """What came of a call in one TP rank: ``error`` is empty when it succeeded."""

    number: int
    tp_rank: int
    error: str = ""
    value: Any = None


def install(address: str) -> None:
    """Add the method to SGLang's scheduler class in this process; answers go to the socket at ``address``."""
    from sglang.srt.managers.scheduler import Scheduler

    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    agents: list[Agent] = []

    def call(scheduler: Any, path: str) -> None:
        if not agents:
            agents.append(Agent(scheduler))
        request = msgspec.msgpack.decode(Path(path).read_bytes(), type=Call)
        socket.send(msgspec.msgpack.encode(agents[0].answer(request)))

    setattr(Scheduler, METHOD, call)


class Agent:
    """The methods, each run on the scheduler's thread, in every TP rank at once."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._tp_rank = int(scheduler.tp_group.rank_in_group)
        self._weights: list[WeightSpec] = []
        self._recording: Any = None
        self._addresses: tuple[int, ...] = ()
        self._loader: Any = None
        self._copying: Any = None
        self._num_copyings = 0

    def answer(self, call: Call) -> Answer:
        """Run a call. It never raises: what is wrong is the answer."""
        try:
            return Answer(call.number, self._tp_rank, value=getattr(self, call.method)(**call.arguments))
        except Exception as error:
            traceback.print_exc()
            return Answer(call.number, self._tp_rank, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------ between syncs

    def pause(self, mode: str) -> bool:
        """Stop taking steps: ``retract`` gives the KV cache of running requests back, ``in_place`` keeps it.

        Returns:
            whether a trainer is attached, and parameters are where they were when it was.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        from sglrollout.engine.scheduler_loader import synchronize

        self._scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
        synchronize()  # a step may be under way on the device, and must not read what a sync writes
        return self._loader is not None and self._is_where_recorded()

    def resume(self, version: int, flush: bool) -> dict[str, float]:
        """Take steps again, after a flush if that is wanted. Tokens sampled from here on are of ``version``.

        Returns:
            the seconds of both.

        Raises:
            RuntimeError: the prefix cache was not flushed; nothing was resumed.
        """
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        begun = time.perf_counter()
        if flush and not self.flush():
            raise RuntimeError("SGLang did not flush its prefix cache")
        flushed = time.perf_counter()
        scheduler_outputs.change_version(version, self._live_requests(), self._num_pending_results())
        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return {"flush_s": flushed - begun, "resume_s": time.perf_counter() - flushed}

    def flush(self) -> bool:
        """Empty the prefix cache. While paused, requests may wait: they hold none of it, and keep their place."""
        scheduler = self._scheduler
        if not scheduler._engine_paused:
            return bool(scheduler.flush_cache(empty_cache=False))
        grammars = scheduler.grammar_manager
        waiting, compiling = scheduler.waiting_queue, grammars.grammar_queue
        scheduler.waiting_queue, grammars.grammar_queue = [], []  # SGLang refuses to flush beside them
        try:
            return bool(scheduler.flush_cache(empty_cache=False))
        finally:
            scheduler.waiting_queue, grammars.grammar_queue = waiting, compiling

    def memory(self) -> dict[str, int]:
        """Bytes of this TP rank's device, and of those what this process's allocator holds."""
        import torch

        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {"free": free, "total": total, "reserved": torch.cuda.memory_reserved()}

    # ------------------------------------------------------------ weights

    def describe(self, weights: list[Any], allow_missing: list[str]) -> WeightReport:
        """Find out where these weights would go; forget what was attached for others."""
        self.detach()
        self._weights = msgspec.convert(weights, list[WeightSpec])
        self._record(allow_missing)
        found = self._recording
        dtypes = [weight.dtype for weight in self._weights]
        copies: list[list[Box]] = [[] for _ in self._weights]
        for copy in found.copies if not found.unsuited else ():
            dtypes[copy.entry] = str(copy.target.dtype).removeprefix("torch.")
            copies[copy.entry].append(copy.box)
        return WeightReport(
            tp_rank=self._tp_rank,
            dtypes=dtypes,
            copies=copies,
            unexpected=found.unexpected,
            missing=found.missing,
            unwritten=found.unwritten,
            duplicates=found.duplicates,
            mismatched=found.mismatched,
            unsuited=found.unsuited,
        )

    def attach(self, links: list[list[str]], engine: str, timeout_s: float) -> None:
        """Join the trainer rank that serves this TP rank and map its memory. ``links``: (path, token) by TP rank."""
        from sglrollout.engine.scheduler_loader import Loader

        self.detach()
        path, token = links[self._tp_rank]
        self._loader = Loader(path, token, engine, self._tp_rank, self._recording, timeout_s)

    def detach(self) -> None:
        """Leave the trainer and give its memory back."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def load(self, timeout_s: float) -> dict[str, float]:
        """Take one sync's weights.

        Raises:
            StaleRecordingError: parameters are no longer where they were when this was attached.
        """
        if self._loader is None:
            raise StaleRecordingError("no trainer is attached to this engine")
        if not self._is_where_recorded():
            self.detach()
            raise StaleRecordingError("the engine's parameters have moved since they were recorded")
        measured: dict[str, float] = self._loader.load(timeout_s)
        return measured

    def load_adapter(self, name: str, lora_id: str, folder: str, config: dict[str, Any]) -> None:
        """Have a LoRA adapter, in place of one of its name, and where batches take it from.

        Raises:
            ValueError: SGLang does not take it.
        """
        from safetensors.torch import load_file
        from sglang.srt.lora.lora_registry import LoRARef

        from sglrollout.engine.scheduler_loader import synchronize

        manager = self._runner.lora_manager
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        reference = LoRARef(lora_id=lora_id, lora_name=name, lora_path=folder, pinned=False)
        known = [other for other in manager.lora_refs.values() if other.lora_name == name]
        results = [manager.unload_lora_adapter(other) for other in known]
        results.append(manager.load_lora_adapter_from_tensors(reference, tensors, config))
        failed = [result.error_message for result in results if not result.success]
        if failed:
            raise ValueError("; ".join(failed))
        try:
            manager.fetch_new_loras({lora_id})  # else the first batch would find out that it does not fit, and die
            synchronize()  # batches run on another stream
        except BaseException:
            manager.unload_lora_adapter(reference)
            raise

    def checksum(self, boxes: list[Any]) -> dict[str, Any]:
        """Sums of what each recorded copy wrote, cut by ``boxes``: by weight, copy, and box of that weight."""
        from sglrollout.checksum import checksum

        if self._recording is None or not self._is_where_recorded():
            raise StaleRecordingError("the engine's parameters have moved since they were recorded")
        by_weight = msgspec.convert(boxes, list[list[Box]])
        sums, num_bytes = [], 0
        for copy in sorted(self._recording.copies, key=lambda copy: copy.entry):
            for box in by_weight[copy.entry]:
                met = copy.box.intersect(box)
                if met is not None:
                    part = narrowed(copy.target, met.within(copy.box))
                    sums.append(checksum(part))
                    num_bytes += part.nbytes
        return {"sums": sums, "num_bytes": num_bytes}

    # ------------------------------------------------------------ from engine to engine

    def begin_export(self) -> dict[str, int]:
        """Begin to write all weights into an anonymous file, which is held until :meth:`end_copy`.

        Returns:
            what to give :meth:`copy_part`, and where the file is: this process, and its descriptor.
        """
        from sglrollout.engine.scheduler_export import Export

        self._refuse_draft()
        self.end_copy()
        self._copying = Export(self._runner.model)
        return {"number": self._num_copyings, "pid": os.getpid(), "fd": self._copying.fd}

    def weights_size(self) -> int:
        """Bytes that an export takes."""
        from sglrollout.engine.scheduler_export import size_of

        return size_of(self._runner.model)

    def begin_adoption(self, paths: list[str]) -> dict[str, int]:
        """Begin to take all weights from a file that another engine wrote, in place. ``paths``: by TP rank.

        Raises:
            WeightsDifferError: it is of another model; nothing was changed.
        """
        from sglrollout.engine.scheduler_export import Adoption

        self._refuse_draft()
        self.end_copy()
        self._copying = Adoption(self._runner.model, paths[self._tp_rank])
        return {"number": self._num_copyings}

    def copy_part(self, number: int, num_bytes: int) -> bool:
        """Go on for so many bytes; whether all is done.

        Raises:
            StaleRecordingError: it was given up, or another one began.
        """
        from sglrollout.engine.scheduler_loader import synchronize

        if self._copying is None or number != self._num_copyings:
            raise StaleRecordingError("this copy of the weights was given up")
        is_done: bool = self._copying.go_on(num_bytes)
        synchronize()
        return is_done

    def end_copy(self) -> None:
        """Let go of the file; a copy that is under way is given up."""
        copying, self._copying = self._copying, None
        self._num_copyings += 1
        if copying is not None:
            copying.close()

    def _refuse_draft(self) -> None:
        if self._scheduler.draft_worker is not None:
            raise NotImplementedError("speculative decoding has a draft model beside it, whose weights are not copied")

    # ------------------------------------------------------------ what was recorded

    def _record(self, allow_missing: list[str]) -> None:
        from sglrollout.engine.scheduler_recorder import record

        self._addresses = self._addresses_now()
        self._recording = record(self._runner.model, self._weights, allow_missing)
        if self._scheduler.draft_worker is not None and not self._recording.unsuited:
            self._recording = self._recording._replace(unsuited="speculative decoding has a draft model beside it")

    def _is_where_recorded(self) -> bool:
        return self._addresses_now() == self._addresses

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._runner.model.parameters())

    # ------------------------------------------------------------ requests

    def _live_requests(self) -> list[Any]:
        """Every request that has begun and not ended."""
        scheduler = self._scheduler
        batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        requests = [req for batch in batches for req in batch.reqs]
        requests += [*scheduler.waiting_queue, *([scheduler.chunked_req] if scheduler.chunked_req else [])]
        return list({id(req): req for req in requests}.values())

    def _num_pending_results(self) -> int:
        """Steps that the device has run and whose tokens are not counted yet (overlapped scheduling)."""
        return len(getattr(self._scheduler, "result_queue", ()) or ()) if self._scheduler.enable_overlap else 0


class StaleRecordingError(Exception):
    """What was recorded of the engine's parameters no longer holds; describe and attach again."""
