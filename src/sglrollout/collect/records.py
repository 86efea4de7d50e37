"""Groups and completions as plain JSON values, and back; and the folder that holds groups and their tensors.

Python's ``json`` writes and reads all of them, infinite and NaN logprobs included.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sglrollout.errors import ConfigError, LifecycleError, RolloutError
from sglrollout.types import Completion, Group, Timings, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_FORMAT_VERSION = "1"
_TENSORS_FILE, _GROUPS_FILE = "batch.safetensors", "groups.jsonl"


def group_to_record(group: Group) -> dict[str, Any]:
    """A group as JSON values: its fields by name, each completion as :func:`completion_to_record` gives it.

    Raises:
        ConfigError: of ``prompt`` or ``data``, with the part of it that is no JSON value.
    """
    return {
        "index": group.index,
        "prompt": json_value(group.prompt, "prompt"),
        "prompt_ids": list(group.prompt_ids),
        "completions": [completion_to_record(completion) for completion in group.completions],
        "data": json_value(group.data, "data"),
        "rewards": None if group.rewards is None else [_optional(float, reward) for reward in group.rewards],
    }


def group_from_record(record: Mapping[str, Any]) -> Group:
    """The group that :func:`group_to_record` made ``record`` of; tuples in ``prompt`` and ``data`` are lists now.

    Raises:
        ConfigError: of ``record``: it is no such record.
    """
    return _restored(_group, record, "group_to_record")


def completion_to_record(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values: its fields by name, and ``text`` where it can be decoded.

    ``weight_versions`` are ``[version, start, end]``; ``error`` is its class's name and its message.
    """
    timings, error = completion.timings, completion.error
    record = {
        "index": completion.index,
        "prompt_ids": list(completion.prompt_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": _optional(list, completion.logprobs),
        "loss_mask": _optional(list, completion.loss_mask),
        "finish_reason": completion.finish_reason,
        "stop_match": completion.stop_match,
        "weight_versions": [list(span) for span in completion.weight_versions],
        "cached_tokens": completion.cached_tokens,
        "engine": completion.engine,
        "timings": timings and {name: getattr(timings, name) for name in Timings.__slots__},
        "error": error and {"type": type(error).__name__, "message": str(error)},
    }
    try:
        return {**record, "text": completion.text}
    except LifecycleError:
        return record


def completion_from_record(record: Mapping[str, Any]) -> Completion:
    """The completion that :func:`completion_to_record` made ``record`` of.

    ``error`` is a :class:`RolloutError` whose message begins with the class's name. ``text`` is the one that was
    saved; where none was, it raises :class:`LifecycleError` as before.

    Raises:
        ConfigError: of ``record``: it is no such record.
    """
    return _restored(_completion, record, "completion_to_record")


def json_value(value: Any, field: str) -> Any:
    """A copy of ``value`` made of JSON values; tuples become lists.

    Raises:
        ConfigError: of ``field``, with the part of it that is neither a text, a number, a truth value, ``None``, a
            list or tuple, nor a dict whose keys are texts.
    """
    try:
        return _copied(value, field)
    except RecursionError:
        raise ConfigError(field, type(value).__name__, "must not contain itself to be saved") from None


def write_folder(
    folder: str | os.PathLike[str], groups: Sequence[Group], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``batch.safetensors`` (``tensors``, contiguous and on the CPU, and ``metadata``) and ``groups.jsonl``.

    They are written beside ``folder``, in a folder that is then renamed: ``folder`` is either whole or not there.

    Raises:
        ConfigError: of ``folder`` (it has something in it, or is a file), or as :func:`group_to_record`.
    """
    target = Path(folder).expanduser().absolute()
    refusal = ConfigError("folder", str(folder), "must be empty or not exist")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise refusal
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        _write(partial, groups, tensors, metadata)
        partial.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):  # another writer was there first
            raise refusal from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_folder(folder: str | os.PathLike[str]) -> tuple[tuple[Group, ...], dict[str, Tensor], dict[str, str]]:
    """What :func:`write_folder` wrote: groups, tensors (on the CPU) and metadata.

    Raises:
        ConfigError: of ``folder``: it is missing, damaged, or of another version of the format.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder).expanduser()
    if not (path / _TENSORS_FILE).is_file() or not (path / _GROUPS_FILE).is_file():
        raise ConfigError("folder", str(folder), f"must hold {_TENSORS_FILE} and {_GROUPS_FILE}")
    try:
        with safe_open(path / _TENSORS_FILE, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_version(metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        return _read_groups(path / _GROUPS_FILE, int(metadata["num_groups"])), tensors, metadata
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigError("folder", str(folder), f"must hold a whole saved batch ({error})") from None


def _write(folder: Path, groups: Sequence[Group], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    with (folder / _GROUPS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(group_to_record(group)) + "\n" for group in groups)
    about = {"format_version": _FORMAT_VERSION, "num_groups": str(len(groups)), **metadata}
    save_file(dict(tensors), folder / _TENSORS_FILE, about)


def _check_version(metadata: Mapping[str, str]) -> None:
    version = metadata.get("format_version")
    if version != _FORMAT_VERSION:
        raise ValueError(f"its format version is {version}, and must be {_FORMAT_VERSION}")


def _read_groups(file: Path, num_groups: int) -> tuple[Group, ...]:
    lines = file.read_text(encoding="utf-8").splitlines()
    if len(lines) != num_groups:
        raise ValueError(f"{file.name} has {len(lines)} groups, and must have {num_groups}")
    return tuple(group_from_record(json.loads(line)) for line in lines)


def _group(record: Mapping[str, Any]) -> Group:
    return Group(
        prompt=record["prompt"],
        prompt_ids=tuple(record["prompt_ids"]),
        completions=tuple(_completion(completion) for completion in record["completions"]),
        index=record["index"],
        data=record["data"],
        rewards=_optional(tuple, record["rewards"]),
    )


def _completion(record: Mapping[str, Any]) -> Completion:
    completion = Completion(
        prompt_ids=tuple(record["prompt_ids"]),
        token_ids=tuple(record["token_ids"]),
        logprobs=_optional(tuple, record["logprobs"]),
        finish_reason=record["finish_reason"],
        stop_match=record["stop_match"],
        weight_versions=tuple(VersionSpan(*span) for span in record["weight_versions"]),
        cached_tokens=record["cached_tokens"],
        engine=record["engine"],
        timings=record["timings"] and Timings(**record["timings"]),
        error=_optional(_error, record["error"]),
        index=record["index"],
        loss_mask=_optional(tuple, record["loss_mask"]),
    )
    if "text" in record:  # which is where pickling puts it, and where the cached property looks
        completion.__dict__["text"] = record["text"]
    return completion


def _error(record: Mapping[str, str]) -> RolloutError:
    kind, message = record["type"], record["message"]
    # What was restored before already begins with the name of the first class.
    return RolloutError(message if kind == RolloutError.__name__ else f"{kind}: {message}")


def _optional(convert: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else convert(value)


def _restored(restore: Callable[[Mapping[str, Any]], _T], record: Mapping[str, Any], maker: str) -> _T:
    try:
        return restore(record)
    except KeyError as error:
        raise ConfigError("record", record, f"must be what {maker} gives, and has no {error}") from None
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("record", record, f"must be what {maker} gives ({error})") from None


def _copied(value: Any, field: str) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_copied(item, field) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copied(item, field) for key, item in value.items()}
    raise ConfigError(field, value, "must be made of JSON values to be saved")
