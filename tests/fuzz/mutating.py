"""Damages bytes as disks, networks, other versions and other people do. Every choice comes from the given chance."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

NUMBERS = (
    b"0", b"-1", b"1e308", b"-1e308", b"1e999", b"NaN", b"Infinity", b"null", b"true", b'""', b"[]", b"{}",
    b"2147483648", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 30,
    b"9" * 5000, b"0.0000001", b"4102444800000000000", b"1000000", b"-0.0",
)  # fmt: skip
STRINGS = (
    b"", b"\\u0000", b"\\ud800", b"\\udce9", b"\xff\xfe", b"\xed\xb3\xa9", b"\0", b"../../etc/passwd", b"/",
    b"a" * 3000, b"\\n", b"{}", b"%s%n", b"\xf0\x9f\x98\x80",
    b"[bold]", b"<script>", b"\\u202e", b"\x1b[2J", b"none", b"-1", b"1e9",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_CONTAINER = re.compile(rb"\[[^][{}]*\]|\{[^][{}]*\}")  # an object or a list without another one in it
_MEMBER = re.compile(rb'"[^"]*":(?:"[^"]*"|-?[\d.]+|null|true|false),?')


def mutated(data: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return the bytes with one to four damages. others: bytes of the same kind, to be mixed in."""
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        data = chance.choice(DAMAGES)(data, chance, others)
    return data


def _flip(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _byte(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def _truncate(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _behead(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return data[chance.randrange(len(data) + 1) :]


def _insert(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice((*STRINGS, b"\n", b'"', b"\xff", b"\xc3")) + data[at:]


def _splice(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    other = chance.choice(others) if others else data
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _repeat(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.randrange(1, 200))
    return data[:end] + data[start:end] * chance.choice((1, 2, 50)) + data[end:]


def _number(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return _put(data, list(_NUMBER.finditer(data)), lambda: chance.choice(NUMBERS), chance)


def _string(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return _put(data, list(_STRING.finditer(data)), lambda: b'"' + chance.choice(STRINGS) + b'"', chance)


def _container(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return _put(data, list(_CONTAINER.finditer(data)), lambda: chance.choice(NUMBERS), chance)


def _grow(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Make all numbers that begin with one digit much larger, as a wrong unit does."""
    digit = b":" + chance.choice(b"123456789").to_bytes(1, "big")
    return data.replace(digit, digit + b"0" * chance.choice((1, 3, 9, 40)))


def _swap_strings(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    known = _STRING.findall(data)
    return _put(data, list(_STRING.finditer(data)), lambda: b'"' + chance.choice(known) + b'"', chance)


def _drop_member(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return _put(data, list(_MEMBER.finditer(data)), lambda: b"", chance)


def _twice(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Write a member of an object twice, with two values."""
    found = list(_MEMBER.finditer(data))
    if not found:
        return data
    member = chance.choice(found)
    again = _NUMBER.sub(lambda _: chance.choice(NUMBERS), member[0], count=1).rstrip(b",")
    return data[: member.start()] + again + b"," + data[member.start() :]


def _nest(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    deep = chance.choice((100, 900, 1100, 20_000))
    opening = chance.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a", b"- "))
    at = chance.choice((0, chance.randrange(len(data) + 1)))
    return data[:at] + opening * deep + data[at:]


def _lines(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Lose, repeat or move whole lines."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return data
    one, two = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(3):
        case 0:
            del lines[one]
        case 1:
            lines.insert(two, lines[one])
        case _:
            lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def _header(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Put one of MessagePack's length headers somewhere, with a length that is not there."""
    at = chance.randrange(len(data) + 1)
    header = chance.choice(
        (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\xc9\xff\xff\xff\xff\xff",
            b"\xd6\xff",
        )
    )
    return data[:at] + header + data[at:]


def _noise(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return chance.choice((b"", b"\0" * 512, chance.randbytes(chance.randrange(300)), json.dumps(data.hex()).encode()))


def _put(data: bytes, places: Sequence[re.Match[bytes]], new: Callable[[], bytes], chance: random.Random) -> bytes:
    if not places:
        return data
    place = chance.choice(places)
    return data[: place.start()] + new() + data[place.end() :]


DAMAGES = (
    _flip, _byte, _truncate, _behead, _insert, _splice, _repeat, _number, _number, _number, _string, _string,
    _container, _swap_strings, _drop_member, _grow, _twice, _nest, _lines, _header, _noise,
)  # fmt: skip


def text(chance: random.Random) -> str:
    """Return text as Python programs may hold it: any code point, lone surrogates and zeros among them."""
    kinds: tuple[Callable[[], str], ...] = (
        lambda: chr(chance.randrange(0x20, 0x7F)),
        lambda: chr(chance.randrange(0xD800, 0xE000)),
        lambda: chr(chance.randrange(0xDC80, 0xDD00)),
        lambda: chr(chance.randrange(0x110000)),
        lambda: chance.choice("\0\n\r\x1b\u2028\ufeff\\\"'"),
    )
    return "".join(chance.choice(kinds)() for _ in range(chance.randrange(40)))
