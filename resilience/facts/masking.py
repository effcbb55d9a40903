"""Which parts of a command line are secret?  Their values are masked before anything is written or shown.

An option or variable is secret if its name contains the whole word `token`, `secret`, `password` or `api-key`:
`--hf-token=x`, `--hf-token x`, `HF_TOKEN=x`, `model.apiKey=x`. Names such as `--tokenizer`, `--max-tokens` and
`--calibration-key` are not secret. Passwords in server addresses are masked too. Only names are checked: a secret
with an ordinary name is not masked. What begins with `--` is an option, and is never taken for a value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

MASK = "***"
_WORDS = frozenset(("token", "secret", "password", "apikey"))
_BOUNDARY = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"',}]+)"""
_ASSIGNED = re.compile(rf"""(?<![\w.-])(?P<name>-{{0,2}}[A-Za-z_][\w.-]*)(?P<between>["']?\s*(?:=|:\s)\s*){_VALUE}""")
_NAMED = re.compile(r"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*)(?P<between>\s+)(?!--)")
_FOLLOWING = re.compile(_VALUE)
_ADDRESS = re.compile(r"(?P<before>\w://[^\s/:@]*:)[^\s/@]+(?=@)")


def masked(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command with all secret values masked."""
    shown: list[str] = []
    is_value_secret = False
    for argument in command:
        is_secret_option = _OPTION.fullmatch(argument) is not None and _is_secret(argument)
        is_option = argument.startswith("--") or is_secret_option
        shown.append(MASK if is_value_secret and not is_option else masked_text(argument))
        is_value_secret = is_secret_option
    return tuple(shown)


def masked_text(text: str) -> str:
    """Return a text, such as a shell command or an address, with all secret values in it masked."""
    text = _with_following_values_masked(_ASSIGNED.sub(_mask, text))
    return _ADDRESS.sub(rf"\g<before>{MASK}", text)


def _with_following_values_masked(text: str) -> str:
    """Mask the value after each secret option. After any other one there may be another option."""
    shown, end = [], 0
    while (named := _NAMED.search(text, end)) is not None:
        value = _FOLLOWING.match(text, named.end()) if _is_secret(named["name"]) else None
        if value is not None and _OPTION.fullmatch(value[0]) and _is_secret(value[0]):
            value = None  # a secret option without a value
        shown += [text[end : named.end()], MASK if value else ""]
        end = value.end() if value else named.end()
    return "".join((*shown, text[end:]))


def _mask(match: re.Match[str]) -> str:
    return match["name"] + match["between"] + MASK if _is_secret(match["name"]) else match[0]


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _BOUNDARY.split(name) if word]
    pairs = {first + second for first, second in itertools.pairwise(words)}
    return not _WORDS.isdisjoint(words) or "apikey" in pairs
