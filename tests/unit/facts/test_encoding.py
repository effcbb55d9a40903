"""Text of any kind goes out as valid UTF-8, with nothing lost; bytes of any kind are a value or a DecodeError."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.errors import DecodeError
from resilience.facts.encoding import (
    cleaned,
    from_builtins,
    from_json,
    from_yaml,
    reader,
    text,
    to_json,
    to_msgpack,
    to_yaml,
)

CAFE = os.fsdecode(b"caf\xe9")
ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too


class Inner(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()


class Outer(msgspec.Struct, frozen=True, omit_defaults=True, tag="outer"):
    name: str = ""
    inner: Inner = Inner()
    by_name: dict[str, str] = {}
    count: int = 0
    data: bytes = b""


def test_bytes_that_are_no_utf_8_are_escaped() -> None:
    assert text(b"caf\xe9") == "caf\\xe9"
    assert text(CAFE) == "caf\\udce9"
    assert text("café\0") == "café\0"


@given(ANY_TEXT)
def test_text_becomes_valid_utf_8_once_and_is_left_as_it_is_only_if_it_was_valid(value: str) -> None:
    text(value).encode()
    assert text(text(value)) == text(value)
    is_valid = value == value.encode("utf-8", "replace").decode()
    assert (text(value) == value) == is_valid


@given(ANY_TEXT, st.dictionaries(ANY_TEXT, ANY_TEXT), st.lists(ANY_TEXT))
def test_struct_with_any_text_is_read_back_escaped(name: str, by_name: dict[str, str], names: list[str]) -> None:
    value = Outer(name, Inner(tuple(names)), by_name)
    clean = cleaned(value)
    assert clean.name == text(name)
    assert clean.inner.names == tuple(map(text, names))
    assert reader(Outer)(to_json(value)) == clean
    assert reader(Outer, "msgpack")(to_msgpack(value)) == clean
    assert from_builtins(from_yaml(to_yaml(msgspec.to_builtins(value)).encode()), Outer) == clean


def test_clean_struct_is_kept_as_it_is() -> None:
    value = Outer("data", Inner(("a",)), data=b"\xff")
    assert cleaned(value) is value


def test_bytes_beside_escaped_text_stay_bytes() -> None:
    value = Outer(CAFE, data=b"\xff\0")
    assert reader(Outer, "msgpack")(to_msgpack(value)).data == b"\xff\0"


def test_integer_beyond_64_bits_is_written_as_text() -> None:
    assert reader(Any, "msgpack")(to_msgpack({"n": 2**70})) == {"n": hex(2**70)}


def test_value_of_an_unknown_type_goes_through_its_fallback_and_is_escaped() -> None:
    class Thing:
        def __repr__(self) -> str:
            return CAFE

    assert from_json(to_json({"thing": Thing(), "name": CAFE}, repr)) == {"thing": text(CAFE), "name": text(CAFE)}


BAD_JSON = {
    "invalid UTF-8": b'{"type":"outer","name":"\xff"}',
    "a lone surrogate": b'{"type":"outer","name":"\\ud800"}',
    "nested too deeply": b'{"type":"outer","x":' + b"[" * 100_000,
    "a huge integer": b'{"type":"outer","count":' + b"9" * 5000 + b"}",
    "no number": b'{"type":"outer","count":NaN}',
    "infinity": b'{"type":"outer","count":1e999}',
    "cut off": b'{"type":"outer","na',
    "empty": b"",
    "zeros": b"\0" * 64,
}
BAD_YAML = {
    "invalid UTF-8": b"a: \xff",
    "nested too deeply": b"[" * 5000,
    "an impossible date": b"a: 2020-99-99",
    "a scalar that contradicts its tag": b"a: !!timestamp x",
    "a huge integer": b"a: " + b"9" * 5000,
    "a zero": b"a: \0",
    "a bad tag": b"a: !!int x",
    "a python object": b"a: !!python/object:os.system x",
}
BAD_MSGPACK = {
    "invalid UTF-8": b"\x82\xa4type\xa5outer\xa4name\xa1\xff",
    "nested too deeply": b"\x91" * 100_000,
    "a length that is not there": b"\xdf\xff\xff\xff\xff",
    "empty": b"",
}


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("read", [reader(Outer), lambda data: from_json(data, Outer)])
def test_json_that_is_none_raises_one_error(read: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(DecodeError):
        read(data)


@pytest.mark.parametrize("data", BAD_YAML.values(), ids=BAD_YAML)
def test_yaml_that_is_none_raises_one_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        from_yaml(data)


@pytest.mark.parametrize("data", BAD_MSGPACK.values(), ids=BAD_MSGPACK)
def test_message_that_is_none_raises_one_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        reader(Outer, "msgpack")(data)


def test_last_one_of_duplicated_keys_counts() -> None:
    assert reader(Outer)(b'{"type":"outer","name":"a","name":"b"}').name == "b"


# -- many threads --------------------------------------------------------------------------------------------------

# Structs that no decoder knows yet. Several threads read them for the first time, or a forked child does meanwhile.
STRUCTS = """
import os, signal, sys, threading
import msgspec
from resilience.facts.encoding import from_builtins, from_json, lines_reader, reader

sys.setswitchinterval(1e-6)
DATA = b'{"entries":[{"names":["a","b"],"number":1,"text":"x"}]}'
PLAIN = {"entries": [{"names": ["a", "b"], "number": 1, "text": "x"}]}

def made():
    entry = msgspec.defstruct("Entry", [("names", tuple[str, str]), ("number", int), ("text", str)])
    kind = msgspec.defstruct("Dump", [("entries", list[entry])])
    of_all = reader(kind)
    return [
        of_all,
        of_all,
        reader(kind),
        lambda data: lines_reader(kind)(data)[0],
        lambda data: from_json(data, kind),
        lambda data: from_builtins(PLAIN, kind),
    ]
"""

THREADS = """
for _ in range(200):
    reads = made()
    barrier, numbers = threading.Barrier(len(reads)), []
    def once(read):
        barrier.wait()
        numbers.append(read(DATA).entries[0].number)
    threads = [threading.Thread(target=once, args=(read,)) for read in reads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == [1] * len(reads), numbers
"""

FORKS = """
def build(readers):
    for reads in readers:
        reads[0](DATA)

for _ in range(100):
    readers = [made() for _ in range(20)]
    thread = threading.Thread(target=build, args=(readers,))
    thread.start()
    pid = os.fork()
    if pid == 0:
        signal.alarm(280)
        build(readers)
        os._exit(0)
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize("what", [THREADS, FORKS], ids=["threads", "forks"])
def test_type_that_several_threads_read_for_the_first_time_crashes_none(what: str) -> None:
    # Python 3.12 and later warn of a fork beside other threads.
    command = [sys.executable, "-W", "ignore", "-c", STRUCTS + what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
