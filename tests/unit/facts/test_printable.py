"""What steers a terminal or hides text is escaped; everything that people write is not."""

from __future__ import annotations

import json
import unicodedata

import pytest

from resilience.facts.printable import printable, printable_json, printable_line

PEOPLE = "Łódź, ελληνικά, עברית, العربية, 日本語, हिन्दी, می‌خواهم, 👩‍🚀, café, \u00a0, ½"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\0b\rc\x7f\b", r"a\x00b\x0dc\x7f\x08"),
        ("\x9b31m\x90q\x9c\x85", r"\x9b31m\x90q\x9c\x85"),
        ("ab\u202ecd\u2066e\u2069\u200f", r"ab\u202ecd\u2066e\u2069\u200f"),
        ("one\u2028two\u2029", r"one\u2028two\u2029"),
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_what_steers_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable_line(text) == shown


def test_what_people_write_stays() -> None:
    assert printable(PEOPLE) == PEOPLE


def test_newlines_and_tabs_stay_in_a_text_and_newlines_are_escaped_in_a_line() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable_line("a\tb\nc") == r"a	b\nc"


def test_escaping_twice_is_escaping_once() -> None:
    every = "".join(map(chr, range(0x110000)))
    assert printable(printable(every)) == printable(every)
    assert printable_line(printable_line(every)) == printable_line(every)


def test_no_control_and_no_bidirectional_control_is_left() -> None:
    left = printable_line("".join(map(chr, range(0x110000)))).replace("\t", "")
    assert not [char for char in left if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")]
    directed = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not [char for char in left if unicodedata.bidirectional(char) in directed]


def test_json_means_the_same() -> None:
    hostile = f"\x9b2J \u202e {PEOPLE} \x7f \x1b \n"
    written = printable_json(json.dumps({hostile: [hostile]}, ensure_ascii=False))
    assert json.loads(written) == {hostile: [hostile]}
    assert printable(written) == written
