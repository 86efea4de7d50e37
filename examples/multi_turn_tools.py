"""A conversation with a calculator: which tokens the model sampled, and which ones it was given.  Runs on a CPU.

Usage:
    python examples/multi_turn_tools.py                            # SmolLM2-135M-Instruct, on the CPU
    python examples/multi_turn_tools.py --tiny                     # a tiny random model: seconds, and nonsense
    python examples/multi_turn_tools.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda

The first turn is held to the form of a call by a regular expression, so that even a model that never learned to call
tools makes one; which numbers it takes is up to it. The second turn is free.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import operator
import tempfile
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

import sglrollout as sr
from sglrollout import testing

QUESTION = "A farm has 17 rows of 23 apple trees. How many trees are there?"
SYSTEM = (
    "You answer questions. A calculator is there for you: "
    '<tool_call>{"name": "calculate", "arguments": {"a": 2, "op": "*", "b": 3}}</tool_call> gives 6.'
)
NUMBER = "[1-9][0-9]{0,2}"
CALL = (
    r'<tool_call>\{"name": "calculate", "arguments": \{"a": '
    rf'{NUMBER}, "op": "[-+*/]", "b": {NUMBER}\}}\}}</tool_call>'
)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
console = Console()


def calculate(a: int, op: Literal["+", "-", "*", "/"], b: int) -> str:
    """Compute one operation on two numbers."""
    return f"The result is {OPERATORS[op](a, b)}."


async def converse(session: sr.Session) -> None:
    """A turn that is a call, the tool's result, and a turn that is an answer."""
    session.add(QUESTION)
    turn = await session.generate(sr.Sampling(temperature=0.0, max_new_tokens=120, regex=CALL))
    session.add(await session.run_tools(turn))
    await session.generate()


def show_conversation(session: sr.Session) -> None:
    """Every message, and the calls that the model made."""
    for message in session.messages:
        console.print(f"[bold]{message['role']}[/bold]: ", end="")
        console.print(str(message["content"]), markup=False, highlight=False)
        for call in message.get("tool_calls", ()):  # type: ignore[attr-defined]
            console.print(f"  calls {call['function']}", markup=False, highlight=False)
    console.print()


def show_mask(session: sr.Session, rollout: sr.AsyncRolloutEngine) -> None:
    """The trajectory as the trainer gets it: what the loss is on stands out."""
    text, runs = Text(), []
    for mask, run in itertools.groupby(
        zip(session.token_ids, session.loss_mask, strict=True), key=lambda pair: pair[1]
    ):
        ids = [token for token, _ in run]
        runs.append(f"{mask} x {len(ids)}")
        text.append(
            rollout.tokenizer.decode(ids, clean_up_tokenization_spaces=False), style="bold green" if mask else "dim"
        )
    console.print(text, "\n")
    console.print(f"loss mask: {', '.join(runs)}", "\n", highlight=False)


def show_turns(session: sr.Session) -> None:
    """What each turn took."""
    table = Table("turn", "prompt tokens", "of them cached", "sampled tokens", "mean logprob", "finish reason")
    for turn in session.turns:
        completion, logprobs = turn.completion, turn.completion.logprobs or ()
        table.add_row(
            str(turn.index),
            str(len(completion.prompt_ids)),
            str(completion.cached_tokens),
            str(len(completion.token_ids)),
            f"{sum(logprobs) / len(logprobs):.2f}",
            turn.finish_reason,
        )
    console.print(table)


async def run(model: str, device: str) -> None:
    answer = sr.Sampling(temperature=0.0, max_new_tokens=48)
    console.print(f"Starting an engine of {model} ...")
    async with (
        sr.AsyncRolloutEngine(model, num_engines=1, device=device) as rollout,
        rollout.session(system=SYSTEM, tools=[calculate], tool_parser="hermes", sampling=answer) as session,
    ):
        await converse(session)
        show_conversation(session)
        show_mask(session, rollout)
        show_turns(session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model in place of it")
    parser.add_argument("--device", default="cpu", choices=["auto", "cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.tiny:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(run(str(testing.tiny_model(directory)), arguments.device))
    else:
        asyncio.run(run(arguments.model or str(testing.smollm2()), arguments.device))


if __name__ == "__main__":
    main()
