"""How do text and values become bytes, and bytes values?  The only module that encodes and decodes.

Users choose exception messages, paths, arguments, and names of sections and nodes. These may contain bytes that are not
UTF-8. Python keeps such bytes as lone surrogates, which no encoder accepts. `text` writes such a byte as an escape, so
nothing is lost and nothing fails. The encoders first try the value as it is, which costs nothing, and escape its text
only if that fails. The decoders raise one error, `DecodeError`, for any bad bytes: not UTF-8, nested too deeply, cut
off, numbers out of range. Decoders of types are built at first use, because building all of them takes longer than
importing this package, and by one thread at a time: msgspec stores its description of a struct on the class before that
description is complete, and another thread that decodes with it crashes. So does a signal handler that decodes a type
which its thread is building; no handler of this package decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import msgspec

from resilience.errors import DecodeError
from resilience.facts.fork_lock import fork_lock

T = TypeVar("T")
LONGEST_REASON = 300  # characters of a decoder's message
_LEAST, _MOST = -(2**63), 2**64 - 1  # integers that msgpack can hold
_UNENCODABLE = (UnicodeEncodeError, OverflowError)
# RecursionError: nested too deeply. TypeError and the others: PyYAML, on a scalar that contradicts its tag.
_UNDECODABLE = (ValueError, RecursionError, OverflowError, TypeError, AttributeError, LookupError)
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()
_BUILDING = fork_lock()
_decoders: dict[tuple[Any, str, bool], Any] = {}


# -- text --------------------------------------------------------------------------------------------


def text(value: str | bytes) -> str:
    """Return valid UTF-8. Invalid bytes become backslash escapes, so nothing is lost."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")


def cleaned(value: T) -> T:
    """Return a struct with only valid UTF-8 text; the same object if its text is valid. Raises: TypeError."""
    try:
        _msgpack.encode(value)
    except _UNENCODABLE:
        return cast(T, _escaped(value))
    return value


# -- encoding ----------------------------------------------------------------------------------------


def to_json(value: Any, fallback: Callable[[Any], Any] | None = None) -> bytes:
    """Return JSON. fallback: converts an object of an unknown type to one that can be encoded.

    Raises: TypeError for a type without a JSON form, if there is no fallback."""
    encode = _json.encode if fallback is None else msgspec.json.Encoder(enc_hook=fallback).encode
    try:
        return encode(value)
    except _UNENCODABLE:
        return encode(_escaped(msgspec.to_builtins(value, enc_hook=fallback)))


def to_json_text(value: Any, fallback: Callable[[Any], Any] | None = None) -> str:
    """Return JSON as text, for the key-value store."""
    return to_json(value, fallback).decode("utf-8")


def to_json_page(value: Any) -> bytes:
    """Return indented JSON for people, with a newline at the end."""
    return msgspec.json.format(to_json(value)) + b"\n"


def to_msgpack(value: Any) -> bytes:
    """Return MessagePack."""
    try:
        return _msgpack.encode(value)
    except _UNENCODABLE:
        return _msgpack.encode(_escaped(msgspec.to_builtins(value, builtin_types=(bytes,))))


def to_yaml(value: Any) -> str:
    """Return builtins as YAML for people, with keys in their given order."""
    import yaml  # only few processes write YAML

    return str(yaml.safe_dump(_escaped(value), sort_keys=False, width=100))


def _escaped(value: Any) -> Any:
    """Return a value with its text converted by `text`, and integers beyond 64 bits as text."""
    match value:
        case str():
            return text(value)
        case dict():
            return {_escaped(key): _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
        case tuple():
            return tuple(map(_escaped, value))
        case msgspec.Struct():
            fields = {name: _escaped(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case bool():
            return value
        case int() if not _LEAST <= value <= _MOST:
            return hex(value)  # Python refuses to print the decimal digits of a huge integer
    return value


# -- decoding ----------------------------------------------------------------------------------------


@overload
def reader(
    kind: type[T], form: Literal["json", "msgpack"] = "json", strict: bool = True
) -> Callable[[bytes | str], T]: ...
@overload
def reader(
    kind: object, form: Literal["json", "msgpack"] = "json", strict: bool = True
) -> Callable[[bytes | str], Any]: ...
def reader(kind: Any, form: Literal["json", "msgpack"] = "json", strict: bool = True) -> Callable[[bytes | str], Any]:
    """Return a function that decodes values of one type. It raises DecodeError and nothing else.

    kind: a type, or a union of structs. strict: False lets text stand for a number."""
    decode: Callable[[bytes | str], Any] | None = None

    def read(data: bytes | str) -> Any:
        nonlocal decode
        if decode is None:
            decode = _decoder(kind, form, strict).decode
        try:
            return decode(data)
        except _UNDECODABLE as error:
            raise _refused(error) from error

    return read


def lines_reader(kind: object) -> Callable[[bytes], list[Any]]:
    """Return a function that decodes many lines of JSON at once. It raises DecodeError and nothing else."""
    decode: Callable[[bytes], list[Any]] | None = None

    def read(data: bytes) -> list[Any]:
        nonlocal decode
        if decode is None:
            decode = _decoder(kind).decode_lines
        try:
            return decode(data)
        except _UNDECODABLE as error:
            raise _refused(error) from error

    return read


def _decoder(kind: Any, form: Literal["json", "msgpack"] = "json", strict: bool = True) -> Any:
    """Return the decoder of a type, which any thread may use."""
    key = kind, form, strict
    decoder = _decoders.get(key)
    if decoder is None:
        with _BUILDING:
            decoders: dict[str, Any] = {"json": msgspec.json.Decoder, "msgpack": msgspec.msgpack.Decoder}
            decoder = _decoders[key] = decoders[form](kind, strict=strict)
    return decoder


@overload
def from_json(data: bytes | str, kind: type[T], strict: bool = True) -> T: ...
@overload
def from_json(data: bytes | str, kind: object = Any, strict: bool = True) -> Any: ...
def from_json(data: bytes | str, kind: Any = Any, strict: bool = True) -> Any:
    """Decode JSON once. strict: False lets text stand for a number. Raises: DecodeError."""
    return _guarded(lambda: _decoder(kind, strict=strict).decode(data))


def from_yaml(data: bytes) -> Any:
    """Decode YAML into builtins. Raises: DecodeError, also for a key that a mapping has twice."""
    import yaml  # only few processes read YAML

    class Loader(yaml.SafeLoader):
        """PyYAML keeps the last of several equal keys; YAML 1.2.2, 3.2.1.1, forbids them."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in names:
                        raise yaml.MarkedYAMLError(
                            problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark
                        )
                    names.add((key.tag, key.value))
            return node

    try:
        return _guarded(lambda: Loader(data.decode("utf-8-sig")).get_single_data())
    except yaml.YAMLError as error:
        raise _refused(error) from error


@overload
def from_builtins(value: Any, kind: type[T], strict: bool = True) -> T: ...
@overload
def from_builtins(value: Any, kind: object, strict: bool = True) -> Any: ...
def from_builtins(value: Any, kind: Any, strict: bool = True) -> Any:
    """Convert a result of `from_yaml`. strict: False lets text stand for a number. Raises: DecodeError."""

    def convert() -> Any:
        _decoder(kind)  # builds what the conversion needs
        return msgspec.convert(value, kind, strict=strict)

    return _guarded(convert)


def _guarded(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except _UNDECODABLE as error:
        raise _refused(error) from error


def _refused(error: Exception) -> DecodeError:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    return DecodeError(text(reason)[:LONGEST_REASON])
