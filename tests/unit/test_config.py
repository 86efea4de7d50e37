"""Options: what is accepted, and that every refusal names field, value and rule."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrollout.config import Options, RolloutConfig, Sampling, check_engine_args
from sglrollout.errors import ConfigError, RolloutError

HUB = "Qwen/Qwen2.5-1.5B"

BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "must be at least 0, got -0.1"),
    ({"temperature": math.nan}, "temperature", "must be a finite number, got nan"),
    ({"temperature": math.inf}, "temperature", "must be a finite number, got inf"),
    ({"temperature": True}, "temperature", "must be a number, got True"),
    ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
    ({"temperature": None}, "temperature", "must be a number, got None"),
    ({"top_p": 0.0}, "top_p", "must be greater than 0 and at most 1, got 0.0"),
    ({"top_p": 1.5}, "top_p", "must be greater than 0 and at most 1, got 1.5"),
    ({"top_k": 0}, "top_k", "must be at least 1, or -1 for all tokens, got 0"),
    ({"top_k": -2}, "top_k", "must be at least 1, or -1 for all tokens, got -2"),
    ({"top_k": 5.0}, "top_k", "must be an integer, got 5.0"),
    ({"min_p": 1.01}, "min_p", "must be between 0 and 1, got 1.01"),
    ({"max_new_tokens": 0}, "max_new_tokens", "must be at least 1, got 0"),
    ({"max_new_tokens": True}, "max_new_tokens", "must be an integer, got True"),
    ({"min_new_tokens": -1}, "min_new_tokens", "must be at least 0, got -1"),
    ({"min_new_tokens": 200}, "min_new_tokens", "must be at most max_new_tokens (128), got 200"),
    ({"stop": ""}, "stop", "must not hold an empty string"),
    ({"stop": ["a", ""]}, "stop", "must not hold an empty string"),
    ({"stop": ["a", 5]}, "stop.1", "must be a string, got 5"),
    ({"stop": ["x"] * 33}, "stop", "must be at most 32 long"),
    ({"stop": {"a"}}, "stop", "must be a list, got {'a'}"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must hold token ids, which are at least 0"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0", "must be an integer, got True"),
    ({"stop_token_ids": 7}, "stop_token_ids", "must be a list, got 7"),
    ({"ignore_eos": 1}, "ignore_eos", "must be True or False, got 1"),
    ({"seed": -1}, "seed", "must be between 0 and 2147483647, got -1"),
    ({"seed": 2**31}, "seed", "must be between 0 and 2147483647, got 2147483648"),
    ({"seed": 1.5}, "seed", "must be an integer or None, got 1.5"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "must be between -2 and 2, got 2.5"),
    ({"presence_penalty": -3}, "presence_penalty", "must be between -2 and 2, got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than 0 and at most 2, got 0"),
    ({"logit_bias": {-1: 2.0}}, "logit_bias", "must have token ids as keys, which are at least 0"),
    ({"logit_bias": {"a": 2.0}}, "logit_bias.a", "must be an integer, got 'a'"),
    ({"logit_bias": {3: math.nan}}, "logit_bias.3", "must be a finite number, got nan"),
    ({"logit_bias": [3]}, "logit_bias", "must be a mapping or None"),
    ({"json_schema": "{"}, "json_schema", "must be a JSON schema: a mapping, or the JSON text of one, got '{'"),
    ({"json_schema": "[]"}, "json_schema", "must be a JSON schema: a mapping, or the JSON text of one, got '[]'"),
    ({"json_schema": {"a": {1, 2}}}, "json_schema", "must be made of JSON values alone"),
    ({"regex": "("}, "regex", "must be a valid regular expression (missing )"),
    ({"regex": ""}, "regex", "must not be empty, got ''"),
    ({"ebnf": " "}, "ebnf", "must not be empty, got ' '"),
    ({"lora": " "}, "lora", "must not be empty, got ' '"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "cannot be combined with regex (give at most one of json_schema, regex"),
    ({"max_new_token": 5}, "max_new_token", 'is not an option (did you mean "max_new_tokens"?), got 5'),
    ({"zzz": 5}, "zzz", "is not an option, got 5"),
]

BAD_CONFIG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": ""}, "model", "must not be empty, got ''"),
    ({"model": "./not-there"}, "model", "must be an existing path or a Hugging Face Hub id, got './not-there'"),
    ({"model": "/not/there"}, "model", "must be an existing path or a Hugging Face Hub id"),
    ({"model": "~nobody-of-that-name/x"}, "model", "must be an existing path or a Hugging Face Hub id"),
    ({"model": "/"}, "model", "must be a model directory, with a config.json in it, got '/'"),
    ({"tokenizer": "../not-there"}, "tokenizer", "must be an existing path or a Hugging Face Hub id"),
    ({"trust_remote_code": "yes"}, "trust_remote_code", "must be True or False, got 'yes'"),
    ({"num_engines": -1}, "num_engines", "must be at least 0, got -1"),
    ({"num_engines": "4"}, "num_engines", "must be an integer or None, got '4'"),
    ({"tp_size": 0}, "tp_size", "must be at least 1, got 0"),
    ({"device": "tpu"}, "device", "must be one of 'auto', 'cuda', 'cpu', got 'tpu'"),
    ({"devices": [0, 1]}, "devices", "must be a list of device lists, one for each engine, such as [[0], [1]]"),
    ({"devices": []}, "devices", "must be a list of device lists, one for each engine"),
    ({"devices": [[True]]}, "devices", 'must hold device indices, at least 0, or UUIDs that start with "GPU-"'),
    ({"devices": [["0"]]}, "devices", 'must hold device indices, at least 0, or UUIDs that start with "GPU-"'),
    ({"devices": [[0], [0]]}, "devices", "must not name a device twice, as it does 0"),
    ({"devices": [[0, 1]]}, "devices.0", "must have tp_size (1) devices, and has 2, got (0, 1)"),
    ({"devices": [[0], [1]], "num_engines": 3}, "devices", "must have one list for each of num_engines (3), and has 2"),
    ({"devices": [[0]], "device": "cpu"}, "devices", 'cannot be given with device="cpu"'),
    ({"dtype": "fp8"}, "dtype", "must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'fp8'"),
    ({"mem_fraction": 1.0}, "mem_fraction", "must be greater than 0 and less than 1, got 1.0"),
    ({"mem_fraction": math.nan}, "mem_fraction", "must be a finite number or None, got nan"),
    ({"context_length": 0}, "context_length", "must be at least 1, got 0"),
    ({"memory_saver": True, "device": "cpu"}, "memory_saver", "must be False on a CPU"),
    ({"deterministic": True, "device": "cpu"}, "deterministic", "must be False on a CPU"),
    ({"isolation": "fork"}, "isolation", "must be one of 'process', 'thread', got 'fork'"),
    ({"isolation": "thread", "num_engines": 2}, "num_engines", 'must be for one engine with isolation="thread"'),
    ({"isolation": "thread", "devices": [[0], [1]]}, "devices", 'must be for one engine with isolation="thread"'),
    ({"max_inflight": 0}, "max_inflight", 'must be an integer of at least 1, or "auto", got 0'),
    ({"max_inflight": "many"}, "max_inflight", "must be an integer of at least 1, or \"auto\", got 'many'"),
    ({"max_inflight": True}, "max_inflight", 'must be an integer of at least 1, or "auto", got True'),
    ({"max_queued": 0}, "max_queued", "must be at least 1, got 0"),
    ({"chunk_tokens": 1025}, "chunk_tokens", "must be between 1 and 1024, got 1025"),
    ({"start_timeout_s": 0}, "start_timeout_s", "must be greater than 0, got 0"),
    ({"request_timeout_s": -1.0}, "request_timeout_s", "must be greater than 0, got -1.0"),
    ({"log_level": "trace"}, "log_level", "must be one of 'debug', 'info', 'warning', 'error', got 'trace'"),
    ({"progress": 1}, "progress", "must be True or False or None, got 1"),
    ({"engine_args": []}, "engine_args", "must be a mapping, got ()"),
    ({"engine_args": {"model_path": "x"}}, "engine_args.model_path", "is set by the option model; use that instead"),
    ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args.tensor_parallel_size", "is set by the option tp_size"),
    ({"engine_args": {"mem_fraction_static": 0.5}}, "engine_args.mem_fraction_static", "the option mem_fraction"),
    ({"engine_args": {"stream_interval": 1}}, "engine_args.stream_interval", "is set by the option chunk_tokens"),
    ({"engine_args": {"port": 3}}, "engine_args.port", "is sglrollout's own to set and cannot be given, got 3"),
    ({"engine_args": {"dp_size": 2}}, "engine_args.dp_size", "must be 1 (use num_engines for data parallelism"),
    ({"engine_args": {"nnodes": 2}}, "engine_args.nnodes", "must be 1 (use remote engines for more than one machine)"),
    ({"engine_args": {"x": print}}, "engine_args.x", "must be plain data (None, bool, finite number, string"),
    ({"engine_args": {"x": [math.inf]}}, "engine_args.x", "must be plain data"),
    ({"num_engine": 2}, "num_engine", 'is not an option (did you mean "num_engines"?), got 2'),
    ({"mem_fraction_static": 0.5}, "mem_fraction_static", 'is not an option (did you mean "mem_fraction"?)'),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size", 'is not an option (did you mean "tp_size"?), got 2'),
    ({"attention_backend": "fa3"}, "attention_backend", "is not an option (SGLang's own arguments go in engine_args)"),
]


def options(case: object) -> str | None:
    return repr(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("given_options", "field", "text"), BAD_SAMPLING, ids=options)
def test_a_wrong_sampling_option_is_refused(given_options: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(**given_options)
    assert refused.value.field == field
    assert f"{field} {refused.value.rule}, got " in str(refused.value)
    assert text in str(refused.value)


@pytest.mark.parametrize(("given_options", "field", "text"), BAD_CONFIG, ids=options)
def test_a_wrong_rollout_option_is_refused(given_options: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RolloutConfig(**{"model": HUB, **given_options})
    assert refused.value.field == field
    assert text in str(refused.value)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model must be given \(Path of a model directory, or .* id\.\), got None"):
        RolloutConfig()  # type: ignore[call-arg]


def test_a_misspelling_is_named_before_the_option_it_leaves_missing() -> None:
    with pytest.raises(ConfigError, match=r"^model_path is not an option"):
        RolloutConfig(model_path=HUB)  # type: ignore[call-arg]


def test_the_error_is_ours_and_a_value_error_and_keeps_the_value() -> None:
    with pytest.raises(ValueError, match="top_k") as refused:
        Sampling(top_k=0)
    assert isinstance(refused.value, RolloutError)
    assert isinstance(refused.value, ConfigError)
    assert refused.value.value == 0
    assert refused.value.__suppress_context__


def test_a_single_string_is_one_stop() -> None:
    assert Sampling(stop="\n").stop == ("\n",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")


def test_numpy_scalars_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    sampling = Sampling(seed=numpy.int64(5), temperature=numpy.float32(0.5), stop_token_ids=(numpy.int32(7),))
    assert (sampling.seed, sampling.temperature, sampling.stop_token_ids) == (5, 0.5, (7,))
    assert type(sampling.wire()["seed"]) is int
    config = RolloutConfig(model=HUB, devices=[[numpy.int64(0)]], max_inflight=numpy.int64(4))
    assert (config.devices, config.max_inflight) == (((0,),), 4)


def test_a_schema_may_be_a_mapping_or_text() -> None:
    schema: dict[str, object] = {"type": "object"}
    assert Sampling(json_schema=schema) == Sampling(json_schema=json.dumps(schema))


def test_wire_holds_what_differs_from_the_defaults() -> None:
    assert Sampling().wire() == {}
    assert Sampling(temperature=1).wire() == {}
    sampling = Sampling(temperature=0, stop=("a",), logprobs=False, logit_bias={})
    assert sampling.wire() == {"temperature": 0.0, "stop": ["a"], "logprobs": False}


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Sampling().temperature = 0.5  # type: ignore[misc]


def test_replace_and_model_copy_validate_again() -> None:
    sampling = Sampling(max_new_tokens=4)
    assert sampling.replace(min_new_tokens=4).min_new_tokens == 4
    assert sampling.model_copy() == sampling
    with pytest.raises(ConfigError, match=r"^min_new_tokens must be at most max_new_tokens \(4\), got 5"):
        sampling.replace(min_new_tokens=5)
    with pytest.raises(ConfigError, match='did you mean "top_p"'):
        sampling.model_copy(update={"topp": 0.5})


def test_model_validate_raises_our_error() -> None:
    assert Sampling.model_validate({"top_k": 5}) == Sampling(top_k=5)
    with pytest.raises(ConfigError, match=r"^top_k must be at least 1"):
        Sampling.model_validate({"top_k": 0})


def test_repr_shows_what_was_chosen() -> None:
    assert repr(Sampling(top_k=5)) == "Sampling(top_k=5)"


def test_options_survive_pickling() -> None:
    config = RolloutConfig(model=HUB, devices=((0, "GPU-1"),), tp_size=2, engine_args={"x": [1]})
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_local_model_needs_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^model must be a model directory, with a config\.json"):
        RolloutConfig(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert RolloutConfig(model=tmp_path).model == str(tmp_path)  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert RolloutConfig(model=f"~/{tmp_path.name}").model == str(tmp_path)


def test_devices_may_be_lists() -> None:
    config = RolloutConfig(model=HUB, devices=[[0, 1], ["GPU-8f2e", 3]], tp_size=2)
    assert config.devices == ((0, 1), ("GPU-8f2e", 3))


def test_one_way_parallelism_may_be_said() -> None:
    assert RolloutConfig(model=HUB, engine_args={"dp_size": 1, "nnodes": 1}).engine_args["dp_size"] == 1


def test_engine_args_are_a_copy() -> None:
    mine: dict[str, object] = {"loaders": ["a"]}
    config = RolloutConfig(model=HUB, engine_args=mine)
    mine["loaders"] = []
    assert config.engine_args == {"loaders": ["a"]}


def test_an_argument_the_installed_sglang_does_not_know_is_refused() -> None:
    known = {"chunked_prefill_size", "attention_backend"}
    check_engine_args({"attention_backend": "fa3"}, known, "0.5.21")
    with pytest.raises(ConfigError) as refused:
        check_engine_args({"chunked_prefil_size": 5}, known, "0.5.21")
    assert str(refused.value) == (
        "engine_args.chunked_prefil_size is not an argument of the installed SGLang 0.5.21 "
        '(did you mean "chunked_prefill_size"?), got 5'
    )


FILES = {
    "c.yaml": 'model: "m/m"\nnum_engines: 2\ndevices: [[0], [1]]\nstart_timeout_s: 5\nengine_args:\n  a: [1, x]\n',
    "c.YML": 'model: "m/m"\nnum_engines: 2\ndevices: [[0], [1]]\nstart_timeout_s: 5.0\nengine_args: {a: [1, x]}\n',
    "c.toml": 'model="m/m"\nnum_engines=2\ndevices=[[0],[1]]\nstart_timeout_s=5\n[engine_args]\na=[1,"x"]\n',
    "c.json": '{"model":"m/m","num_engines":2,"devices":[[0],[1]],"start_timeout_s":5,"engine_args":{"a":[1,"x"]}}',
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_say_the_same(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(FILES[name])
    expected = RolloutConfig(
        model="m/m", num_engines=2, devices=((0,), (1,)), start_timeout_s=5, engine_args={"a": [1, "x"]}
    )
    assert RolloutConfig.from_file(file) == expected
    assert RolloutConfig.from_file(str(file), chunk_tokens=1) == expected.replace(chunk_tokens=1)


def test_a_dump_is_read_back(tmp_path: Path) -> None:
    config = RolloutConfig(model=HUB, tp_size=2, devices=((0, 1),), mem_fraction=0.5, engine_args={"a": {"b": None}})
    file = tmp_path / "c.json"
    file.write_text(json.dumps(config.model_dump()))
    assert RolloutConfig.from_file(file) == config


BAD_FILES = [
    ("c.ini", "", r"^path must end in \.yaml, \.yml, \.toml, \.json, got"),
    ("c.json", '{\n"model": }', r"^path must be valid JSON \(line 2: Expecting value\), got"),
    ("c.yaml", "model: x\n  y: [", r"^path must be valid YAML \(line 2: "),
    ("c.yaml", "\x07", r"^path must be valid YAML \("),
    ("c.toml", 'model = "x"\nmodel', r"^path must be valid TOML \(.*line 2"),
    ("c.yaml", "- a", "^path must hold a mapping of option names to values, and holds a list, got"),
    ("c.yaml", "", "^path must hold a mapping of option names to values, and holds nothing, got"),
    ("c.yaml", "1: x", "^1 is not an option: names are strings, and this is 1, got 'x'"),
    ("c.yaml", "model: m\nnum_engin: 2", r'^num_engin is not an option \(did you mean "num_engines"\?\), got 2'),
    ("c.yaml", "model: m\ntp_size: true", "^tp_size must be an integer, got True"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_wrong_file_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        RolloutConfig.from_file(tmp_path / name)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^path must name an existing file, got '.*missing\.yaml'"):
        RolloutConfig.from_file(tmp_path / "missing.yaml")
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"^path must be a readable file \(Is a directory\)"):
        RolloutConfig.from_file(tmp_path / "d.yaml")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^path must be UTF-8 text"):
        RolloutConfig.from_file(tmp_path / "b.json")


@pytest.mark.parametrize("model", [Sampling, RolloutConfig])
def test_the_reference_has_every_option(model: type[Options]) -> None:
    lines = model.reference().splitlines()
    assert lines[0] == "| option | type | default | description |"
    assert len(lines) == 2 + len(model.model_fields)
    for name, line in zip(model.model_fields, lines[2:], strict=True):
        assert line.startswith(f"| `{name}` | `")
        assert line.replace(r"\|", "").count("|") == 5
        assert "None |" not in line.rsplit(" | ", 1)[1]


def test_the_reference_spells_types_defaults_and_bounds() -> None:
    assert "| `model` | `str` | required |" in RolloutConfig.reference()
    assert '| `device` | `"auto" \\| "cuda" \\| "cpu"` | `\'auto\'` |' in RolloutConfig.reference()
    assert "| `devices` | `Sequence[Sequence[int \\| str]] \\| None` | `None` |" in RolloutConfig.reference()
    assert "Must be between 1 and 1024. |" in RolloutConfig.reference()


@pytest.mark.parametrize("model", [Sampling, RolloutConfig])
def test_every_option_is_described_in_a_sentence(model: type[Options]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


VALID = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 10) | st.integers(0, 3),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.just(-1) | st.integers(1, 200_000),
        "min_p": st.floats(0, 1),
        "max_new_tokens": st.integers(64, 100_000),
        "min_new_tokens": st.integers(0, 64),
        "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=32),
        "stop_token_ids": st.lists(st.integers(0, 200_000)),
        "seed": st.none() | st.integers(0, 2**31 - 1),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100)),
        "json_schema": st.none() | st.just({"type": "object"}) | st.just("{}"),
        "logprobs": st.booleans(),
    },
)


@given(VALID)
def test_valid_sampling_round_trips(given_options: dict[str, Any]) -> None:
    sampling = Sampling(**given_options)
    assert Sampling(**sampling.wire()) == sampling
    assert Sampling(**sampling.model_dump()) == sampling
    assert sampling.replace() == sampling


@given(VALID)
def test_wire_is_plain_data(given_options: dict[str, Any]) -> None:
    msgspec = pytest.importorskip("msgspec")
    wire = Sampling(**given_options).wire()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire)) == wire
