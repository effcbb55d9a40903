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
_FOLLOWING = re.compile(rf"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*)(?P<between>\s+)(?!--){_VALUE}")
_ADDRESS = re.compile(r"(?P<before>\w://[^\s/:@]*:)[^\s/@]+(?=@)")


def masked(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command with all secret values masked."""
    shown: list[str] = []
    is_value_secret = False
    for argument in command:
        shown.append(MASK if is_value_secret and not argument.startswith("--") else masked_text(argument))
        is_value_secret = _OPTION.fullmatch(argument) is not None and _is_secret(argument)
    return tuple(shown)


def masked_text(text: str) -> str:
    """Return a text, such as a shell command or an address, with all secret values in it masked."""
    for pattern in (_ASSIGNED, _FOLLOWING):
        text = pattern.sub(_mask, text)
    return _ADDRESS.sub(rf"\g<before>{MASK}", text)


def _mask(match: re.Match[str]) -> str:
    return match["name"] + match["between"] + MASK if _is_secret(match["name"]) else match[0]


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _BOUNDARY.split(name) if word]
    pairs = {first + second for first, second in itertools.pairwise(words)}
    return not _WORDS.isdisjoint(words) or "apikey" in pairs
