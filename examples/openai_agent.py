"""An agent that knows the openai client alone, and what a trainer gets of its conversations.  Runs on a CPU.

Several agents run at once: each asks a question, runs the tool that the model calls, and asks once more. Then each
conversation is taken out of the endpoint, by the id of its last response: its exact tokens, mask and logprobs.

Usage:
    python examples/openai_agent.py                            # SmolLM2-135M-Instruct, on the CPU
    python examples/openai_agent.py --tiny                     # a tiny random model: seconds, and nonsense
    python examples/openai_agent.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda

A model this small seldom calls a tool by itself, so that the first turn is held to the form of a call by a regular
expression; which city it takes is up to it. The other turns are free.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from typing import Any

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

import sglrollout as sr
from sglrollout import testing

QUESTIONS = ["What is the population of Oslo?", "How many people live in Paris?", "I like Rome. Is it a big city?"]
PEOPLE = {"Oslo": 700_000, "Paris": 2_100_000, "Rome": 2_750_000}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up how many people live in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": [*PEOPLE]}}},
    },
}
SYSTEM = (
    'You know cities. First you look up how many people live in a city, with <tool_call>{"name": "look_up", '
    '"arguments": {"city": "Bonn"}}</tool_call>. Then you say what you found in one short sentence.'
)
CALL = rf'<tool_call>\{{"name": "look_up", "arguments": \{{"city": "({"|".join(PEOPLE)})"\}}\}}</tool_call>'
console = Console(width=120)

# ------------------------------------------------------------ the agent: nothing of sglrollout


def look_up(city: str) -> str:
    return f"{PEOPLE[city]:,} people live in {city}."


async def agent(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    """Three turns; the id of the last response."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    options: dict[str, Any] = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 120}

    answer = await client.chat.completions.create(messages=messages, **options, extra_body={"regex": CALL})
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = look_up(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer = await client.chat.completions.create(messages=messages, **options)
    messages += [answer.choices[0].message, {"role": "user", "content": "Is that more than a million?"}]

    answer = await client.chat.completions.create(messages=messages, **options)
    return answer.id


# ------------------------------------------------------------ the training script


def show_mask(completion: sr.Completion, rollout: sr.AsyncRolloutEngine) -> None:
    """One conversation as the trainer gets it: what the loss is on stands out."""
    text = Text(rollout.tokenizer.decode(completion.prompt_ids), style="dim")
    pairs = zip(completion.token_ids, completion.loss_mask or (), strict=True)
    for mask, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text.append(rollout.tokenizer.decode([token for token, _ in run]), style="bold green" if mask else "dim")
    console.print(text, "\n")


def show_table(completions: list[sr.Completion]) -> None:
    """What there is of each conversation."""
    table = Table("question", "prompt tokens", "tokens after it", "of them sampled", "mean logprob", "weight versions")
    for question, completion in zip(QUESTIONS, completions, strict=True):
        mask, logprobs = completion.loss_mask or (), completion.logprobs or ()
        table.add_row(
            question,
            str(len(completion.prompt_ids)),
            str(len(completion.token_ids)),
            str(sum(mask)),
            f"{sum(logprobs) / sum(mask):.2f}",
            ", ".join(str(span.version) for span in completion.weight_versions),
        )
    console.print(table)


async def run(model: str, device: str) -> None:
    console.print(f"Starting an engine of {model} ...")
    async with (
        sr.AsyncRolloutEngine(model, num_engines=1, device=device) as rollout,
        rollout.serve_openai(tool_parser="hermes") as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.api_key) as client,
    ):
        console.print(f"Serving it at {endpoint.url}\n")
        ids = await asyncio.gather(*(agent(client, endpoint.model, question) for question in QUESTIONS))
        completions = [endpoint.take(response_id) for response_id in ids]
        show_mask(completions[0], rollout)
        show_table(completions)


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
