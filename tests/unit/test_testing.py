from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout import testing
from sglrollout.engine.cpu_support import forgive_torchvision
from sglrollout.errors import ConfigError, RolloutError
from sglrollout.testing import models

forgive_torchvision()

PROMPTS = ("Hello", "Why is the sky blue?", "The capital of France is")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(testing.tiny_model(tmp_path_factory.mktemp("tokenizer")))


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def greedy(model: Any, prompt_ids: list[int], num_tokens: int = 40) -> list[int]:
    import torch

    prompt = torch.tensor([prompt_ids])
    output = model.generate(prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return list(map(int, output[0, len(prompt_ids) :]))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_greedy_text_of_a_tiny_model_varies(
    architecture: Literal["qwen3", "llama"], tie: bool, tokenizer: Any, tmp_path: Path
) -> None:
    model = load(testing.tiny_model(tmp_path, architecture=architecture, tie=tie))
    outputs = [greedy(model, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output)) > 15 for output in outputs)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        (testing.tiny_model(tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((0, 0, 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_checkpoint_has_the_asked_for_dtype_and_sizes(tmp_path: Path) -> None:
    import torch

    path = testing.tiny_model(tmp_path, dtype="bfloat16", vocab_size=300, num_layers=3, tokenizer=False)
    model = load(path)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.shape == (300, 64)
    assert model.config.num_hidden_layers == 3
    assert not (path / "tokenizer.json").exists()


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokens_are_bytes_pairs_of_letters_and_specials(tokenizer: Any) -> None:
    assert len(tokenizer("é")["input_ids"]) == 2
    assert len(tokenizer("ab")["input_ids"]) == 1
    assert tokenizer("<|im_end|>")["input_ids"] == [2] == [tokenizer.eos_token_id]
    assert len(tokenizer) == 512


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("architecture", "gpt2"), ("dtype", "int8"), ("vocab_size", 258)], ids=lambda v: str(v)
)
def test_wrong_options_are_named(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        testing.tiny_model(tmp_path, **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_smollm2_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(RolloutError, match="pip install"):
        testing.smollm2(tmp_path)


def test_smollm2_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert_gguf", fake_conversion)
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: Path("unused.gguf"))
    monkeypatch.setenv("SGLROLLOUT_CACHE", str(tmp_path))
    first = testing.smollm2(progress=False)
    monkeypatch.setattr(models, "_convert_gguf", no_conversion)
    assert testing.smollm2(progress=False) == first == tmp_path / "smollm2-135m-instruct"
    assert (first / "config.json").read_text() == "{}"


def test_two_preparations_at_once_leave_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2, timeout=10)

    def convert(gguf: Path, checkpoint: Path, stage: Callable[[str], None]) -> None:
        fake_conversion(gguf, checkpoint, stage)
        barrier.wait()

    monkeypatch.setattr(models, "_convert_gguf", convert)
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: Path("unused.gguf"))
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(testing.smollm2(tmp_path, progress=False))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "smollm2-135m-instruct"] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["smollm2-135m-instruct"]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert_gguf", no_conversion)
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: Path("unused.gguf"))
    with pytest.raises(OSError, match="disk full"):
        testing.smollm2(tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = testing.smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert "Paris" in tokenizer.decode(greedy(load(path), prompt, num_tokens=8))


def fake_conversion(gguf: Path, checkpoint: Path, stage: Callable[[str], None]) -> None:
    stage("writing the checkpoint")
    (checkpoint / "config.json").write_text("{}")


def no_conversion(gguf: Path, checkpoint: Path, stage: Callable[[str], None]) -> None:
    (checkpoint / "half").touch()
    raise OSError("disk full")
