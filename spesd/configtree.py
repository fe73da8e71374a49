"""Parsed TOML or JSON to frozen config dataclasses, with refusals that name the key.

Decides what counts as a wrong type and as an unknown key; never which settings exist.
"""

import dataclasses
import math
import types
import typing
from typing import Any, Literal, TypeVar

from spesd.errors import ConfigError

T = TypeVar("T")


def from_tree(kind: type[T], tree: Any, where: str = "") -> T:
    """Build the config dataclass `kind` from parsed TOML or JSON.

    Raises ConfigError, with the dotted key, on an unknown key or a value of another type.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{where or 'the config'} must be a table.")
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(
                f"unknown key {dotted!r}; the keys here are {', '.join(sorted(known))}."
            )
        values[key] = _typed(hints[key], value, dotted)
    return kind(**values)


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_tree(typing.cast(type[Any], hint), value, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}; it is one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list.")
        return tuple(_typed(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table.")
        return {str(k): _typed(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(args[0], value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(
            f"{where} is {value!r}; it must be {_KIND_NAMES.get(hint, hint.__name__)}."
        )
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}; it must be finite.")
    return value


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def positive(name: str, value: float) -> None:
    """Refuse a value that is not above 0."""
    if value <= 0:
        raise ConfigError(f"{name} is {value}; it must be above 0.")


def not_negative(name: str, value: float) -> None:
    """Refuse a value below 0."""
    if value < 0:
        raise ConfigError(f"{name} is {value}; it must not be negative.")


def fraction(name: str, value: float, *, below_one: bool = False) -> None:
    """Refuse a value outside 0 to 1."""
    if value < 0 or value > 1 or (below_one and value == 1):
        raise ConfigError(f"{name} is {value}; it must lie between 0 and 1.")
