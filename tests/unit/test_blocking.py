from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sglrollout as sr
from sglrollout import blocking as blocking_module
from sglrollout.collect.collector import Collector
from sglrollout.engine.protocol import Request
from sglrollout.generation.batch import GroupStream
from sglrollout.generation.stream import Stream
from sglrollout.session.stream import SessionStream
from sglrollout.testing import ScriptedEngine
from sglrollout.types import Prompt

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [1, 2, 3]
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)

Make = Callable[..., sr.RolloutEngine]


@pytest.fixture
def rollout_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A rollout, not started, whose engines are these."""
    made: list[sr.RolloutEngine] = []

    def make(*engines: ScriptedEngine, **options: Any) -> sr.RolloutEngine:
        monkeypatch.setattr("sglrollout.rollout.build_engines", lambda config: list(engines))
        made.append(sr.RolloutEngine(config=CONFIG.replace(**options)))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()


def becomes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def is_idle(rollout: sr.RolloutEngine, *engines: ScriptedEngine) -> bool:
    slots = sum(status.num_inflight for status in rollout.engines)
    return not (slots or rollout.num_queued or any(engine.num_running or engine.num_waiting for engine in engines))


def portal_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "portal" in thread.name.lower()]


# ------------------------------------------------------------ the same results, without async


def test_generate_returns_groups_in_order(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine("engine-0"), ScriptedEngine("engine-1")) as rollout:
        groups = rollout.generate([[i] for i in range(20)], n=3, sampling=SHORT)
        assert [group.prompt for group in groups] == [[i] for i in range(20)]
        assert all(len(completion.token_ids) == 4 for group in groups for completion in group.completions)


def test_as_completed_gives_every_group_once(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine()) as rollout:
        prompts: Iterator[Prompt] = ([i] for i in range(30))
        assert sorted(group.index for group in rollout.as_completed(prompts, sampling=SHORT)) == list(range(30))


def test_stream_is_a_plain_iterator_of_chunks(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine()) as rollout:
        chunks = list(rollout.stream(PROMPT, SHORT.replace(max_new_tokens=20), chunk_tokens=8))
        assert [len(chunk.token_ids) for chunk in chunks] == [8, 8, 4]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


def test_the_state_can_be_read_before_during_and_after(rollout_of: Make) -> None:
    rollout = rollout_of(ScriptedEngine(weight_version=5))
    assert (rollout.engines, rollout.num_queued, rollout.weight_version) == ((), 0, 0)
    with rollout:
        assert [status.state for status in rollout.engines] == ["ready"]
        assert rollout.weight_version == 5
        rollout.flush_cache()
        with pytest.raises(sr.LifecycleError, match="no tokenizer"):
            _ = rollout.tokenizer


# ------------------------------------------------------------ leaving early


def test_break_aborts_the_stream(rollout_of: Make) -> None:
    engine = ScriptedEngine(token_s=0.001)
    with rollout_of(engine) as rollout:
        for _ in rollout.stream(PROMPT, LONG, chunk_tokens=1):
            break
        assert becomes(lambda: is_idle(rollout, engine))
        assert len(engine.aborted) == 1


def test_break_aborts_what_as_completed_still_runs(rollout_of: Make) -> None:
    engine = ScriptedEngine(token_s=0.001, script=lambda ids, sampling, index: ([1] * ids[0], [0.0] * ids[0]))
    with rollout_of(engine) as rollout:
        for _ in rollout.as_completed([[1], [3000], [3000]], sampling=LONG):
            break
        assert becomes(lambda: is_idle(rollout, engine))
        assert len(engine.aborted) == 2


def test_an_exception_in_the_loop_aborts_the_stream_and_comes_through(rollout_of: Make) -> None:
    engine = ScriptedEngine(token_s=0.001)
    with rollout_of(engine) as rollout:

        def user_code() -> None:
            for _ in rollout.stream(PROMPT, LONG, chunk_tokens=1):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            user_code()
        gc.collect()
        assert becomes(lambda: is_idle(rollout, engine))


def test_a_stream_that_outlives_the_rollout_ends_quietly(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine(token_s=0.001)) as rollout:
        chunks = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        next(chunks)
    with pytest.raises(sr.LifecycleError):
        next(chunks)
    del chunks
    gc.collect()


# ------------------------------------------------------------ threads and loops


def test_several_threads_may_call_at_once(rollout_of: Make) -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    with rollout_of(*engines, max_inflight=3) as rollout:

        def one(number: int) -> list[int]:
            if number % 2:
                return [token for chunk in rollout.stream([number], SHORT) for token in chunk.token_ids]
            return list(rollout.generate([[number]], sampling=SHORT)[0].completions[0].token_ids)

        with ThreadPoolExecutor(16) as threads:
            results = list(threads.map(one, range(64)))
        expected = [
            list(engines[0].script([number], {"max_new_tokens": 4, "ignore_eos": True}, 0)[0]) for number in range(64)
        ]
        assert results == expected
        assert is_idle(rollout, *engines)
    assert max(engine.peak_running for engine in engines) <= 3


async def test_it_works_where_a_loop_runs_already_as_in_a_notebook(rollout_of: Make) -> None:
    assert asyncio.get_running_loop().is_running()
    with rollout_of(ScriptedEngine()) as rollout:
        assert len(rollout.generate([PROMPT], sampling=SHORT)) == 1
        assert sum(len(chunk.token_ids) for chunk in rollout.stream(PROMPT, SHORT)) == 4


def test_start_that_does_not_wait_returns_at_once(rollout_of: Make) -> None:
    engine = ScriptedEngine(start_s=0.1)
    begun = time.monotonic()
    rollout = rollout_of(engine).start(wait=False)
    assert time.monotonic() - begun < 0.1
    assert not engine.alive
    assert len(rollout.generate([PROMPT], sampling=SHORT)) == 1


# ------------------------------------------------------------ errors


def test_errors_keep_their_type(rollout_of: Make) -> None:
    def refuses(request: Request) -> str | None:
        return "refused" if request.prompt_ids[0] == 13 else None

    with rollout_of(ScriptedEngine(fail_request=refuses)) as rollout:
        with pytest.raises(sr.EngineRequestError, match="engine-0: refused"):
            rollout.generate([[1], [13]], sampling=SHORT)
        with pytest.raises(sr.EngineRequestError):
            list(rollout.stream([13], SHORT))
        with pytest.raises(sr.ConfigError) as caught:
            rollout.generate([[1], ["x"]])  # type: ignore[list-item]
        assert caught.value.field == "prompts[1]"
        with pytest.raises(sr.ConfigError, match="chunk_tokens"):
            rollout.stream(PROMPT, chunk_tokens=0)
        with pytest.raises(sr.RequestTimeoutError):
            rollout.generate([PROMPT], sampling=LONG, timeout_s=0.001)
        (group,) = rollout.generate([[13]], on_error="return")
        assert isinstance(group.completions[0].error, sr.EngineRequestError)


def test_an_exception_of_the_users_prompts_keeps_its_type(rollout_of: Make) -> None:
    def broken() -> Iterator[Prompt]:
        yield [1]
        raise ZeroDivisionError("in the user's iterator")

    with rollout_of(ScriptedEngine()) as rollout, pytest.raises(ZeroDivisionError, match="user's iterator"):
        list(rollout.as_completed(broken(), sampling=LONG))


def test_the_death_of_every_engine_is_told(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine(die_after=10)) as rollout:
        with pytest.raises(sr.EngineDiedError, match="engine-0"):
            rollout.generate([PROMPT], sampling=LONG)
        with pytest.raises(sr.NoEngineError):
            rollout.generate([PROMPT])


def test_a_failed_start_raises_the_engines_own_error_and_leaves_no_thread(rollout_of: Make) -> None:
    before = portal_threads()
    engines = [ScriptedEngine("engine-0", start_s=60), ScriptedEngine("engine-1", fail_start="no such model")]
    rollout = rollout_of(*engines)
    with pytest.raises(sr.EngineStartError, match="engine-1: no such model"):
        rollout.start()
    assert engines[0].stage == "closed"
    assert becomes(lambda: portal_threads() == before)
    with pytest.raises(sr.LifecycleError):
        rollout.generate([PROMPT])
    rollout.close()


def test_options_are_checked_when_it_is_made() -> None:
    with pytest.raises(sr.ConfigError, match="num_engines"):
        sr.RolloutEngine("org/name", num_engines=0)


# ------------------------------------------------------------ life


def test_it_says_what_to_do_when_it_is_not_running(rollout_of: Make) -> None:
    rollout = rollout_of(ScriptedEngine())
    for call in (lambda: rollout.generate([PROMPT]), lambda: rollout.stream(PROMPT), rollout.flush_cache):
        with pytest.raises(sr.LifecycleError, match="start"):
            call()
    rollout.close()
    with rollout, pytest.raises(sr.LifecycleError, match="started already"):
        rollout.start()
    rollout.close()
    rollout.close()
    with pytest.raises(sr.LifecycleError):
        rollout.generate([PROMPT])


def test_close_ends_the_engines_and_the_thread(rollout_of: Make) -> None:
    before = portal_threads()
    engine = ScriptedEngine()
    with rollout_of(engine):
        assert engine.alive
    assert engine.stage == "closed"
    assert becomes(lambda: portal_threads() == before)


def test_closing_ends_a_call_of_another_thread(rollout_of: Make) -> None:
    engine = ScriptedEngine(hang=True)
    rollout = rollout_of(engine).start()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(rollout.generate, [PROMPT])
        assert becomes(lambda: len(engine.submitted) == 1)
        rollout.close()
        assert isinstance(call.exception(timeout=5), sr.LifecycleError)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """As at a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C, as soon as ``condition`` holds. A real signal: nothing less wakes a thread that waits for a lock."""

    def wait_and_interrupt() -> None:
        assert becomes(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    return thread


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_ends_generate_and_what_it_started(rollout_of: Make) -> None:
    engine = ScriptedEngine(hang=True)
    with rollout_of(engine, max_inflight=2) as rollout:
        interrupter = interrupt_when(lambda: len(engine.submitted) == 2)
        with pytest.raises(KeyboardInterrupt):
            rollout.generate([[i] for i in range(10)])
        interrupter.join()
        assert becomes(lambda: is_idle(rollout, engine))
        assert len(engine.aborted) == 2
        engine.hang = False
        assert len(rollout.generate([PROMPT], sampling=SHORT)) == 1


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_in_a_stream_aborts_it(rollout_of: Make) -> None:
    engine = ScriptedEngine(hang=True)
    with rollout_of(engine) as rollout:
        interrupter = interrupt_when(lambda: len(engine.submitted) == 1)
        with pytest.raises(KeyboardInterrupt):
            list(rollout.stream(PROMPT))
        interrupter.join()
        assert becomes(lambda: is_idle(rollout, engine))
        assert len(engine.aborted) == 1


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_during_start_ends_the_engines(rollout_of: Make) -> None:
    before = portal_threads()
    engine = ScriptedEngine(start_s=60)
    rollout = rollout_of(engine)
    interrupter = interrupt_when(lambda: engine.stage == "starting")
    with pytest.raises(KeyboardInterrupt):
        rollout.start()
    interrupter.join()
    assert engine.stage == "closed"
    assert becomes(lambda: portal_threads() == before)


def test_a_script_that_forgets_to_close_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sglrollout.rollout, sglrollout as sr
        from sglrollout.testing import ScriptedEngine

        sglrollout.rollout.build_engines = lambda config: [ScriptedEngine()]
        rollout = sr.RolloutEngine("org/name", engine_args={"skip_tokenizer_init": True}).start()
        for chunk in rollout.stream([1], sr.Sampling(max_new_tokens=1000)):
            break
        """)
    )
    done = subprocess.run([sys.executable, script], timeout=20, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


FAILS_BEFORE_CLOSE = """
import sglrollout as sr
from sglrollout.testing import ScriptedEngine

config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True})
rollout = sr.RolloutEngine(config=config, engines=[ScriptedEngine()]).start()
rollout.generate([[1, 2]])
raise SystemExit(7)
"""

IN_A_FORK = """
import os, sys
import sglrollout as sr
from sglrollout.testing import ScriptedEngine

config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True})
rollout = sr.RolloutEngine(config=config, engines=[ScriptedEngine()]).start()
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (lambda: rollout.generate([[1, 2]]), rollout.flush_cache, rollout.close):
        try:
            call()
        except sr.LifecycleError:
            refused += 1
    os._exit(refused)
_, status = os.waitpid(pid, 0)
rollout.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("script", "code"), [(FAILS_BEFORE_CLOSE, 7), (IN_A_FORK, 3)])
def test_a_script_that_fails_or_forks_does_not_hang(script: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == code


# ------------------------------------------------------------ collections and sessions


def test_a_collection_gives_its_batches_to_a_plain_loop_and_can_be_saved(rollout_of: Make) -> None:
    source = [[1, i] for i in range(10)]
    with rollout_of(ScriptedEngine()) as rollout:
        collector = rollout.collect(source, n=2, sampling=SHORT, target_groups=4, reward=lambda completion: 1.0)
        assert collector.stats is None
        assert len(next(collector)) == 8
        assert collector.stats is not None
        assert collector.report is not None
        state = collector.state_dict()
        collector.close()

        again = rollout.collect(source, n=2, sampling=SHORT, target_groups=4, reward=lambda completion: 1.0)
        again.load_state_dict(state)
        assert [len(batch) for batch in again] == [8, 4]


def test_leaving_the_loop_over_a_collection_frees_its_slots(rollout_of: Make) -> None:
    engine = ScriptedEngine(token_s=0.001)
    with rollout_of(engine) as rollout:
        for batch in rollout.collect(
            [[1, i] for i in range(20)], sampling=LONG.replace(max_new_tokens=50), target_groups=1
        ):
            assert len(batch) == 1
            break
        gc.collect()
        assert becomes(lambda: is_idle(rollout, engine))


def test_a_session_waits_out_sleep_until_another_thread_wakes_the_engines(rollout_of: Make) -> None:
    with (
        rollout_of(ScriptedEngine(memory_saver=True)) as rollout,
        rollout.session(sampling=SHORT) as session,
        ThreadPoolExecutor(1) as threads,
    ):
        session.add_tokens(PROMPT)
        rollout.sleep(["kv_cache"])
        with pytest.raises(sr.LifecycleError, match="asleep"):
            session.generate()
        session.wait_out_sleep()
        turn = threads.submit(session.generate)
        with pytest.raises(TimeoutError):
            turn.result(0.1)
        rollout.wake()
        assert len(turn.result(5).completion.token_ids) == 4


def test_a_session_takes_turns_and_forks(rollout_of: Make) -> None:
    with rollout_of(ScriptedEngine()) as rollout:
        with rollout.session(sampling=SHORT, max_turns=3) as session:
            session.add_tokens(PROMPT)
            first = session.generate()
            fork = session.fork()
            session.add_tokens([9])
            chunks = list(session.stream(chunk_tokens=2))
            fork.add_tokens([8])
            fork.generate()
        assert session.completion.loss_mask == (1, 1, 1, 1, 0, 1, 1, 1, 1)
        assert session.token_ids[:8] == (*PROMPT, *first.completion.token_ids, 9)
        assert fork.token_ids[:8] == (*PROMPT, *first.completion.token_ids, 8)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4
        assert session.num_turns == 2
        with pytest.raises(sr.LifecycleError):
            session.generate()
        with pytest.raises(AttributeError):
            _ = session.no_such_thing


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (sr.AsyncRolloutEngine, sr.RolloutEngine),
        (sr.Session, blocking_module.BlockingSession),
        (SessionStream, blocking_module.BlockingSessionStream),
        (Stream, blocking_module.BlockingStream),
        (GroupStream, blocking_module.BlockingGroupStream),
        (Collector, blocking_module.BlockingCollector),
        (sr.WeightSyncer, blocking_module.BlockingWeightSyncer),
    ],
)
def test_all_that_can_be_awaited_can_be_had_without_a_loop(asynchronous: type, blocking: type) -> None:
    def methods(kind: type) -> set[str]:
        return {name for name, value in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    only_async = {"aclose": "close"}
    assert methods(asynchronous) - methods(blocking) <= set(only_async)
