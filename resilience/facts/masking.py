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
_ASSIGNED = re.compile(r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?:\\?["']\s*[=:]|\s*(?:=|:\s))\s*""")
_NAMED = re.compile(r"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*)\s+(?!--)")
_VALUE = re.compile(r"""\\?"[^"]*"|'[^']*'|[^\s"',}]+""")
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
    text = _with_values_masked(_NAMED, _with_values_masked(_ASSIGNED, text))
    return _ADDRESS.sub(rf"\g<before>{MASK}", text)


def _with_values_masked(names: re.Pattern[str], text: str) -> str:
    """Mask the value after each secret name. The value of any other name is searched: it may hold secrets itself."""
    shown, end = [], 0
    while (named := names.search(text, end)) is not None:
        value = _VALUE.match(text, named.end()) if _is_secret(named["name"]) else None
        if value is not None and names is _NAMED and _OPTION.fullmatch(value[0]) and _is_secret(value[0]):
            value = None  # a secret option without a value
        shown += [text[end : named.end()], MASK if value else ""]
        end = value.end() if value else named.end()
    return "".join((*shown, text[end:]))


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _BOUNDARY.split(name) if word]
    pairs = {first + second for first, second in itertools.pairwise(words)}
    return not _WORDS.isdisjoint(words) or "apikey" in pairs
