"""Frozen dataclasses ↔ JSON values, driven by their type hints and strict: nothing is guessed, and no code is run.

dataclass            object of its fields; one that has its default is left out
one of several       the same, with the class's name under "_"
Mapping[str, X]      object
tuple                array
Enum                 its value
float                number, or "inf", "-inf", "nan" where no string could stand
int, str, bool, None themselves
"""

from __future__ import annotations

import json
import math
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

INT = 1 << 63
"""Integers are smaller than this, and not smaller than its negative."""

_SPECIAL = ("inf", "-inf", "nan")

Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How a type is encoded and decoded."""


class CodecError(ValueError):
    """A JSON value that is not what the type asks for; `path` says where it is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str | int] = []

    def __str__(self) -> str:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path).lstrip(".")
        return f"{where}: {self.args[0]}" if where else str(self.args[0])


def dumps(value: Any) -> bytes:
    """Canonical JSON: keys sorted, no spaces, ASCII, floats by the shortest digits that give them back."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def loads(text: bytes) -> Any:
    """What JSON text says. Raises CodecError."""

    def refuse(name: str) -> None:
        raise CodecError(f"{name} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CodecError(f"{_shown(twice)} twice in one object")
        return found

    try:
        return json.loads(text.decode("ascii"), parse_constant=refuse, object_pairs_hook=once)
    except RecursionError:
        raise CodecError("nests too deep") from None
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"not JSON: {error}") from None


def values(text: bytes) -> int:
    """How many values JSON text has, or more, where strings look like some."""
    return 1 + sum(map(text.count, (b",", b":", b"[", b"{")))


class Codec:
    """Encodes and decodes values by type.

    classes  for a base class, the classes that may stand for it
    special  how types that JSON has nothing for are encoded and decoded
    """

    def __init__(self, classes: Mapping[type, tuple[type, ...]], special: Mapping[Any, Pair]) -> None:
        self._classes = classes
        self._pairs: dict[Any, Pair] = dict(special)

    def encode(self, value: Any, hint: Any) -> Any:
        """The JSON value for a value of type `hint`. Raises CodecError if it is not of that type."""
        return self.pair(hint)[0](value)

    def decode(self, value: Any, hint: Any) -> Any:
        """The value of type `hint` for a JSON value, which is used up. Raises CodecError if it stands for none."""
        try:
            return self.pair(hint)[1](value)
        except RecursionError:
            raise CodecError("nests too deep") from None

    def pair(self, hint: Any) -> Pair:
        if hint not in self._pairs:
            self._pairs[hint] = self._make(hint)
        return self._pairs[hint]

    def _make(self, hint: Any) -> Pair:
        if hint in _SCALARS:
            return _SCALARS[hint]
        if hint is Any or hint is tuple:
            return _encode_any, _decode_any if hint is Any else _decode_bare_tuple
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            return self._union(get_args(hint))
        if origin is tuple:
            return self._tuple(get_args(hint))
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(get_args(hint)[1])
        if hint in self._classes:
            return self._union(self._classes[hint])
        if is_dataclass(hint):
            return self._dataclass(cast(type, hint))
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enum(hint)
        raise TypeError(f"no JSON for {hint}")

    def _union(self, options: tuple[Any, ...]) -> Pair:
        classes: dict[str, type] = {c.__name__: c for c in options if isinstance(c, type) and is_dataclass(c)}
        scalars = tuple(o for o in options if not is_dataclass(o))
        if not classes:
            return _scalars(scalars)

        def encode(value: Any) -> Any:
            name = type(value).__name__
            if classes.get(name) is not type(value):
                return self.encode(value, _union_of(scalars))
            return {"_": name, **self.pair(type(value))[0](value)}

        def decode(value: Any) -> Any:
            if type(value) is not dict:
                if not scalars:
                    raise CodecError(f"expected an object, got {_shown(value)}")
                return self.decode(value, _union_of(scalars))
            tag = value.pop("_", None)  # JSON that has been parsed for this
            if type(tag) is not str or tag not in classes:
                raise CodecError(f"expected one of {', '.join(classes)}, got {_shown(tag)}")
            return self.pair(classes[tag])[1](value)

        return encode, decode

    def _tuple(self, items: tuple[Any, ...]) -> Pair:
        if len(items) == 2 and items[1] is ...:
            hint = items[0]

            def encode(value: Any) -> Any:
                one = self.pair(hint)[0]
                return [one(v) for v in value]

            def decode(value: Any) -> Any:
                if type(value) is not list:
                    raise CodecError(f"expected an array, got {_shown(value)}")
                one, out = self.pair(hint)[1], []
                try:
                    for v in value:
                        out.append(one(v))
                except CodecError as error:
                    error.path.insert(0, len(out))
                    raise
                return tuple(out)

            return encode, decode

        def encode_each(value: Any) -> Any:
            return [self.pair(h)[0](v) for h, v in zip(items, value, strict=True)]

        def decode_each(value: Any) -> Any:
            if type(value) is not list or len(value) != len(items):
                raise CodecError(f"expected an array of {len(items)}, got {_shown(value)}")
            return tuple(self.pair(h)[1](v) for h, v in zip(items, value, strict=True))

        return encode_each, decode_each

    def _mapping(self, hint: Any) -> Pair:
        def encode(value: Any) -> Any:
            return {_encode_str(k): self.pair(hint)[0](value[k]) for k in sorted(value)}  # as they are read: arrays are numbered

        def decode(value: Any) -> Any:
            if type(value) is not dict:
                raise CodecError(f"expected an object, got {_shown(value)}")
            one, out, key = self.pair(hint)[1], {}, ""
            for key in value:
                _decode_str(key)
            try:
                for key, v in value.items():
                    out[key] = one(v)
            except CodecError as error:
                error.path.insert(0, key)
                raise
            return out

        return encode, decode

    def _dataclass(self, cls: type) -> Pair:
        hints = _hints(cls)
        stored = [f for f in fields(cls) if f.metadata.get("stored", True)]
        names = {f.name for f in stored}
        required = {f.name for f in stored if f.default is MISSING and f.default_factory is MISSING}
        defaults: dict[str, str] = {}
        decoders: dict[str, Callable[[Any], Any]] = {}

        def encode(value: Any) -> Any:
            if type(value) is not cls:
                raise CodecError(f"expected {cls.__name__}, got {_shown(value)}")
            if not defaults:
                defaults.update({f.name: repr(self.encode(_default(f), hints[f.name])) for f in stored if f.name not in required})
                defaults[""] = ""
            out = {}
            for f in stored:
                try:
                    field = self.pair(hints[f.name])[0](getattr(value, f.name))
                except CodecError as error:
                    error.path.insert(0, f.name)
                    raise
                if f.name in required or repr(field) != defaults[f.name]:
                    out[f.name] = field
            return out

        def decode(value: Any) -> Any:
            if type(value) is not dict:
                raise CodecError(f"expected an object, got {_shown(value)}")
            if not decoders:
                decoders.update({name: self.pair(hints[name])[1] for name in names})
            if not required <= value.keys() <= names:
                unknown, missing = sorted(value.keys() - names), sorted(required - value.keys())
                raise CodecError(
                    f"{cls.__name__} has no {_shown(unknown[0])}" if unknown else f"{cls.__name__} lacks {missing[0]}"
                )
            out, key = {}, ""
            try:
                for key, v in value.items():
                    out[key] = decoders[key](v)
            except CodecError as error:
                error.path.insert(0, key)
                raise
            return cls(**out)

        return encode, decode


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of fields: the same for every codec, of which a plan that is read has its own."""
    return get_type_hints(cls)


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _union_of(options: tuple[Any, ...]) -> Any:
    return Union[options]  # noqa: UP007


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- Scalars ---------------------------------------------------------------------------------------------------------


def _encode_int(value: Any) -> int:
    try:
        number = operator.index(value)  # NumPy's integers too
    except TypeError:
        raise CodecError(f"expected an integer, got {_shown(value)}") from None
    return _decode_int(int(number))


def _decode_int(value: Any) -> int:
    if type(value) is not int or not -INT <= value < INT:
        raise CodecError(f"expected an integer of 64 bits, got {_shown(value)}")
    return value


def _encode_float(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else repr(number)


def _decode_float(value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # 1e999 is JSON
        return value
    if type(value) is int and -INT <= value < INT:
        return float(value)
    if type(value) is str and value in _SPECIAL:
        return float(value)
    raise CodecError(f"expected a number, got {_shown(value)}")


def _encode_str(value: Any) -> str:
    if not isinstance(value, str):
        raise CodecError(f"expected a string, got {_shown(value)}")
    return str(value)


def _decode_str(value: Any) -> str:
    if type(value) is not str:
        raise CodecError(f"expected a string, got {_shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can write halves of characters, which nothing can print
            raise CodecError(f"expected Unicode, got {_shown(value)}") from None
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise CodecError(f"expected true or false, got {_shown(value)}")
    return value


def _none(value: Any) -> None:
    if value is not None:
        raise CodecError(f"expected null, got {_shown(value)}")


INTEGER: Pair = _encode_int, _decode_int
NUMBER: Pair = _encode_float, _decode_float

_SCALARS: dict[Any, Pair] = {
    int: INTEGER,
    float: NUMBER,
    str: (_encode_str, _decode_str),
    bool: (_bool, _bool),
    type(None): (_none, _none),
}


def _scalars(options: tuple[Any, ...]) -> Pair:
    """A union of scalars and bare tuples: JSON's own types tell them apart."""
    words = str in options

    def encode(value: Any) -> Any:
        if tuple in options and isinstance(value, tuple | list):
            return _encode_any(value)
        for kind in (bool, type(None), int, str):
            if kind in options and isinstance(value, kind):
                return _SCALARS[kind][0](value)
        if float in options and isinstance(value, float):
            if words and not math.isfinite(value):
                raise CodecError(f"{value} cannot stand where a string could")
            return _encode_float(value)
        if int in options and hasattr(value, "__index__"):
            return _encode_int(value)
        if float in options and hasattr(value, "__float__"):
            return encode(float(value))
        raise CodecError(f"unexpected {_shown(value)}")

    def decode(value: Any) -> Any:
        kind = type(value)
        if kind is list and tuple in options:
            return _decode_bare_tuple(value)
        if kind is str and not words and float in options:
            return _decode_float(value)
        if kind not in options or kind not in _SCALARS:
            raise CodecError(f"unexpected {_shown(value)}")
        return _SCALARS[kind][1](value)

    return encode, decode


def _encode_any(value: Any) -> Any:
    """Scalars and tuples of them, to any depth."""
    if isinstance(value, tuple | list):
        return [_encode_any(v) for v in value]
    return _ANY[0](value)


def _decode_any(value: Any) -> Any:
    return _decode_bare_tuple(value) if type(value) is list else _ANY[1](value)


def _decode_bare_tuple(value: Any) -> tuple:
    if type(value) is not list:
        raise CodecError(f"expected an array, got {_shown(value)}")
    return tuple(map(_decode_any, value))


_ANY = _scalars((int, float, str, bool, type(None)))

CONSTANT = float | int | bool | None
"""The type of an expression's constants."""

OF_CONSTANT: Pair = _scalars(get_args(CONSTANT))


def _enum(cls: type[Enum]) -> Pair:
    members = {m.value: m for m in cls}

    def encode(value: Any) -> Any:
        if not isinstance(value, cls):
            raise CodecError(f"expected {cls.__name__}, got {_shown(value)}")
        return value.value

    def decode(value: Any) -> Any:
        if type(value) is not str or value not in members:
            raise CodecError(f"{_shown(value)} is no {cls.__name__}")
        return members[value]

    return encode, decode
