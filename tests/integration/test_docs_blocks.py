"""Every Python block of every page runs, page by page, from its first to its last, over one real engine on the CPU.

A page's blocks share their names. Names that a page leaves to its reader are in ``SUPPLIED``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import random
import re
import symtable
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sglrollout as sr
from sglrollout import testing
from sglrollout.engine.cpu_support import forgive_torchvision
from sglrollout.engine.installed import sglang_version
from sglrollout.engine.server import launch_server
from sglrollout.generation.sample import Sample
from tests.pages import PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.slow

MOST_ROUNDS = 3
MOST_TOKENS = 16
MOST_SYNCS = 100
"""Of one page."""

SHORT = sr.Sampling(max_new_tokens=MOST_TOKENS)
PYTHON_PAGES = [path for path in PAGES if any(blocks(path, "python"))]

# ------------------------------------------------------------ the engine behind all pages


TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
"""The beginning of a chat template that tells of tools, as those of models on the Hub do."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = testing.tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "chat_template": TOOLS + testing.CHAT_TEMPLATE}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
async def shared(model_path: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """An engine of this module's own: pages change its weights."""
    async with sr.AsyncRolloutEngine(model_path, device="cpu", dtype="float32") as engine:
        yield engine


def borrowing(shared: sr.AsyncRolloutEngine) -> type[sr.AsyncRolloutEngine]:
    """The class that pages see: options are checked as they are given, and the engine is the shared one."""

    class Borrowed(sr.AsyncRolloutEngine):
        async def start(self, wait: bool = True) -> Any:
            if self.config.memory_saver:  # a CPU has no memory to give back
                self._given_engines = [
                    testing.ScriptedEngine(f"engine-{i}", memory_saver=True)
                    for i in range(self.config.num_engines or 1)
                ]
                self.config = self.config.replace(model=shared.config.model)
                return await super().start(wait)
            if self.config.lora_rank is not None:  # pages after this one go on without an adapter
                self.config = self.config.replace(model=shared.config.model)
                return await super().start(wait)
            own = {name: vars(self)[name] for name in ("config", "_exports", "_given_engines")}
            vars(self).update(vars(shared) | own)
            return self

        async def close(self) -> None:
            if self.config.memory_saver or self.config.lora_rank is not None:
                await super().close()
            self._withdraw_exports()

    return Borrowed


@pytest.fixture(autouse=True)
def machine(
    shared: sr.AsyncRolloutEngine, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What pages take for granted: GPUs, models on the Hub, ports and accounts. Here all of it is small."""
    forgive_torchvision()
    import prometheus_client
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from_pretrained, init_process_group = AutoModelForCausalLM.from_pretrained, dist.init_process_group
    room: Callable[[Sample], int] = vars(Sample)["room"].fget
    start_http_server, servers = prometheus_client.start_http_server, []

    def serve(port: int) -> None:
        servers.append(start_http_server(0, addr="127.0.0.1"))

    def meet(backend: str) -> None:
        init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(sr, "AsyncRolloutEngine", borrowing(shared))
    monkeypatch.setattr(sr, "launch_server", described)
    monkeypatch.setattr(Sample, "room", property(lambda sample: min(room(sample), left(sample))))
    monkeypatch.setattr(testing, "smollm2", lambda: model_path)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda path, **options: from_pretrained(model_path, **options)
    )
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setattr(prometheus_client, "start_http_server", serve)
    monkeypatch.setitem(sys.modules, "wandb", wandb())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join(5)


@asynccontextmanager
async def described(*given: Any, **options: Any) -> AsyncIterator[SimpleNamespace]:
    """A server whose options are right, and that is not started."""
    server = launch_server(*given, **options)

    async def wait() -> None:
        assert server.stage == "not started"

    yield SimpleNamespace(url="http://10.0.0.2:30000", pid=1, api_key=server.api_key, wait=wait)


def left(sample: Sample) -> int:
    """Few tokens, unless a grammar asks for more."""
    return sample.sampling.max_new_tokens if sample.sampling.regex else MOST_TOKENS - len(sample.request.token_ids)


def wandb() -> ModuleType:
    module = ModuleType("wandb")

    def log(data: dict[str, float], step: int) -> None:
        assert data
        assert all(isinstance(value, (int, float)) for value in data.values())

    vars(module)["log"] = log
    return module


# ------------------------------------------------------------ what pages leave to their readers


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_minimal", ROOT / "examples" / "grpo_minimal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tasks() -> list[sr.Task]:
    return [sr.Task(f"{i} + {i} =", data=str(2 * i)) for i in range(3)]


def load_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("the tiny one")


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def actor_critic_of(model: Any) -> Any:
    import torch

    return torch.nn.ModuleDict({"actor": model, "critic": torch.nn.Linear(64, 1)})


def policy_gradient(output_ids: Any, logprobs: Any, advantages: Any, loss_mask: Any) -> Any:
    assert output_ids.shape == logprobs.shape == loss_mask.shape
    return -(advantages[:, None] * logprobs * loss_mask).sum()


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def search(query: str, order: str) -> list[str]:
    return [f"nothing about {query}, {order}"]


async def ask_a_judge(prompt: sr.Prompt, text: str) -> float:
    return float(len(text) % 2)


def chance(completion: sr.Completion) -> float:
    return float(completion.token_ids[0] % 2)


def lucky(reward: Callable[[sr.Completion, sr.Task], float]) -> Callable[[sr.Completion, sr.Task], float]:
    """A page's own reward, and what a random model, which is never right, has in its place."""

    @wraps(reward)
    def judged(completion: sr.Completion, task: sr.Task) -> float:
        return reward(completion, task) + chance(completion)

    return judged


async def checkpoint_of(rollout: sr.AsyncRolloutEngine) -> Path:
    """What a run left behind that ended in the middle of its data."""
    collector = rollout.collect(tasks(), n=8, target_groups=1, reward=chance, sampling=SHORT)
    async with collector as batches:
        await batches
        saved = {"version": rollout.weight_version + MOST_SYNCS, "collector": collector.state_dict()}
    path = Path("checkpoint.json")
    path.write_text(json.dumps(saved), encoding="utf-8")
    return path


SUPPLIED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "prompts": lambda names: ["What is 2 + 3?", "What is 3 + 5?"],
    "sampling": lambda names: SHORT,
    "dataset": lambda names: tasks(),
    "tasks": lambda names: tasks(),
    "rng": lambda names: random.Random(0),
    "sums": lambda names: example().sums,
    "reward": lambda names: chance,
    "rewarded": lambda names: example().rewarded,
    "judge": lambda names: chance,
    "ask_a_judge": lambda names: ask_a_judge,
    "calculator": lambda names: multiply,
    "archive": lambda names: SimpleNamespace(search=search),
    "policy_gradient": lambda names: policy_gradient,
    "logprobs_of": lambda names: example().logprobs_of,
    "train": lambda names: example().train,
    "model": lambda names: load_model(),
    "optimizer": lambda names: optimizer_of(names["model"]),
    "actor_critic": lambda names: actor_critic_of(names["model"]),
    "folder": lambda names: Path.cwd(),
    "syncer": lambda names: sr.WeightSyncer(names["rollout"], sr.ModuleSource(names["model"])),
    "session": lambda names: names["rollout"].session(),
    "checkpoint": lambda names: checkpoint_of(names["rollout"]),
}
"""Names that a page may use without having made them, each from ``rollout`` and those above it."""


# ------------------------------------------------------------ how a page runs


class Here(ast.NodeTransformer):
    """A block as it can run in a loop that runs already, on a CPU, with a model that is never right."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.Await(node.args[0]) if ast.unparse(node.func) == "asyncio.run" else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("cpu") if node.value == "cuda" else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name == "reward":
            node.decorator_list.append(ast.Name("lucky", ast.Load()))
        return node


def few(*bounds: int) -> range:
    return range(*bounds)[:MOST_ROUNDS]


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables(child)


def asked_of_the_reader(path: Path) -> set[str]:
    """Names that a page's blocks use, and that neither they nor blocks above them make."""
    made: set[str] = set()
    asked: set[str] = set()
    for block in blocks(path, "python"):
        top = symtable.symtable(block.text, path.name, "exec")
        made |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        used = (symbol for table in tables(top) for symbol in table.get_symbols() if symbol.is_referenced())
        asked |= {symbol.get_name() for symbol in used if symbol.is_global()} - made
    return asked


async def supplied(path: Path, rollout: sr.AsyncRolloutEngine) -> dict[str, Any]:
    """What a page's blocks begin with."""
    names: dict[str, Any] = {"__name__": "__main__", "range": few, "lucky": lucky, "rollout": rollout, "sr": sr}
    wanted = asked_of_the_reader(path) | {"model"}
    for name, make in SUPPLIED.items():
        if name in wanted:
            made = make(names)
            names[name] = await made if inspect.isawaitable(made) else made
    return names


async def run(block: Block, path: Path, names: dict[str, Any]) -> None:
    tree = ast.fix_missing_locations(Here().visit(ast.parse(block.text)))
    ast.increment_lineno(tree, block.line)  # so that a traceback shows the page
    code = compile(tree, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    running = eval(code, names)
    if inspect.iscoroutine(running):
        await running


async def run_page(path: Path, shared: sr.AsyncRolloutEngine) -> None:
    names = await supplied(path, shared)
    try:
        for block in blocks(path, "python"):
            await run(block, path, names)
    finally:
        if "syncer" in names:
            await names["syncer"].close()  # once more, if the page did


@pytest.mark.parametrize("path", PYTHON_PAGES, ids=lambda path: path.name)
async def test_the_python_on_a_page_runs(path: Path, shared: sr.AsyncRolloutEngine, tmp_path: Path) -> None:
    if sglang_version() == "0.5.17" and re.search(r"\bregex=", path.read_text(encoding="utf-8")):
        pytest.skip("grammars of SGLang 0.5.17 pin memory, which a CPU cannot")
    for block in blocks(path, "yaml"):
        if named := re.match(r"# (\S+)\n", block.text):
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    await run_page(path, shared)
    assert [engine.state for engine in shared.engines] == ["ready"]
    assert shared.metrics().num_inflight == 0


PAGE = """
```python
import asyncio

first = await rollout.generate(prompts, sampling=sampling)
```

```python
async def main() -> None:
    for group in first:
        print(group.completion)


asyncio.run(main())
```
"""


async def test_a_page_that_is_wrong_fails_at_its_line(shared: sr.AsyncRolloutEngine, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert asked_of_the_reader(page) >= {"rollout", "prompts", "sampling"}
    assert not asked_of_the_reader(page) & {"asyncio", "first", "main", "group"}
    with pytest.raises(AttributeError, match="completion") as caught:
        await run_page(page, shared)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 11)


@pytest.mark.parametrize("name", SUPPLIED)
def test_every_name_that_is_supplied_is_used_on_some_page(name: str) -> None:
    assert any(name in asked_of_the_reader(path) for path in PYTHON_PAGES)


def test_pages_with_python_are_found() -> None:
    assert {"README.md", "sessions.md", "weight-sync.md"} <= {path.name for path in PYTHON_PAGES}
