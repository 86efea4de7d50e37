"""The base of every options model: one kind of error, re-validating copies, files, and a reference table."""

from __future__ import annotations

import difflib
import numbers
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sglrollout._files import read_mapping
from sglrollout.errors import ConfigError

_TYPE_RULES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be True or False",
    "string_type": "must be a string",
    "is_instance_of": "must be a list",
    "dict_type": "must be a mapping",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, if one is like it at all."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


class Options(BaseModel):
    """Frozen, strict options whose every error is a :class:`ConfigError` that names field, value and rule."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        with _config_errors(type(self)):
            super().__init__(**{name: _plain(value) for name, value in data.items()})

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """As pydantic's, but raises :class:`ConfigError`."""
        with _config_errors(cls):
            return super().model_validate(obj, **kwargs)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Read a ``.yaml``, ``.yml``, ``.toml`` or ``.json`` file of options; ``overrides`` win over it.

        An override replaces the whole option, a mapping included. Relative paths in the file are relative to the
        working directory, as everywhere else.

        Raises:
            ConfigError: of the field ``path`` when the file is missing, malformed, of another kind or not a mapping;
                of the option concerned when one is unknown or wrong.
        """
        return cls(**{**read_mapping(path), **overrides})

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``, validated as a whole again.

        Raises:
            ConfigError: the copy would be wrong.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As :meth:`replace`: pydantic's own would not validate ``update``. ``deep`` changes nothing."""
        return self.replace(**(update or {}))

    def non_defaults(self) -> dict[str, Any]:
        """The options that differ from their defaults, in the order of their declaration."""
        fields = type(self).model_fields
        pairs = ((name, getattr(self, name), field) for name, field in fields.items())
        return {name: value for name, value, field in pairs if value != _default(field)}

    @classmethod
    def reference(cls) -> str:
        """A markdown table of every option: name, type, default, description."""
        rows = [f"| `{name}` | {' | '.join(_reference_cells(field))} |" for name, field in cls.model_fields.items()]
        return "\n".join(["| option | type | default | description |", "|---|---|---|---|", *rows])

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.non_defaults().items()

    @classmethod
    def unknown_rule(cls, name: str) -> str:
        """The rule that an option called ``name``, which is not one, breaks."""
        match = nearest(name, cls.model_fields)
        return f'is not an option (did you mean "{match}"?)' if match else "is not an option"


def _plain(value: Any) -> Any:
    """Lists become tuples; numpy's scalars become Python's, as ``rng.integers(...)`` is a common seed."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(_plain(item) for item in value) if isinstance(value, (list, tuple)) else value


@contextmanager
def _config_errors(model: type[Options]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise _config_error(model, error) from None


def _config_error(model: type[Options], error: ValidationError) -> ConfigError:
    details = error.errors(include_url=False)
    # A misspelt option often shows up as a missing one too; the misspelling is the cause.
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    name = ".".join(str(part) for part in first["loc"] if part != "[key]")
    value = None if first["type"] == "missing" else first["input"]
    return ConfigError(name or model.__name__, value, str(cause) if cause else _rule(model, first))


def _rule(model: type[Options], detail: ErrorDetails) -> str:
    kind, loc = detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        return model.unknown_rule(str(loc[0]))
    field = model.model_fields.get(str(loc[0])) if loc else None
    if kind == "missing" and field:
        return f"must be given ({field.description})"
    if kind == "literal_error":
        return f"must be one of {detail['ctx']['expected'].replace(' or ', ', ')}"
    if kind in _TYPE_RULES:
        optional = field is not None and len(loc) == 1 and type(None) in get_args(field.annotation)
        return _TYPE_RULES[kind] + (" or None" if optional else "")
    bounds = _bounds(field) if field else ""
    return f"must be {bounds}" if bounds else f"is wrong: {detail['msg']}"


def _bounds(field: FieldInfo) -> str:
    """The field's limits in words, such as ``between 1 and 32``, or nothing."""
    found = {key: getattr(item, key) for item in field.metadata for key in _BOUND_WORDS if hasattr(item, key)}
    if found.keys() == {"ge", "le"}:
        return f"between {_number(found['ge'])} and {_number(found['le'])}"
    return " and ".join(words.format(_number(found[key])) for key, words in _BOUND_WORDS.items() if key in found)


_BOUND_WORDS = {
    "ge": "at least {}",
    "gt": "greater than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
}


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _reference_cells(field: FieldInfo) -> tuple[str, str, str]:
    bounds = _bounds(field)
    description = f"{field.description}{f' Must be {bounds}.' if bounds else ''}"
    default = "required" if field.is_required() else f"`{_default(field)!r}`"
    return tuple(cell.replace("|", r"\|") for cell in (f"`{_type_name(field.annotation)}`", default, description))  # type: ignore[return-value]


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(argument) for argument in arguments)}]"
    if annotation in (None, type(None)):
        return "None"
    return "..." if annotation is Ellipsis else str(annotation.__name__)
