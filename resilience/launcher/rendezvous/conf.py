"""What do the values of `--rdzv-conf` mean?  They are text, or come from code; each function reads one kind of value.

Raises ConfigurationError with the key, its value and what is expected."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core.control import Policy
from resilience.core.terms import Terms
from resilience.errors import ConfigurationError

KEYS = {"inner", "join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
ETCD_KEYS = {"attempt", "read_timeout", "protocol", "ssl_cert", "ssl_cert_key", "ca_cert"}
KEYS_OF = {  # further keys that each back end reads
    "c10d": {"is_host", "store_timeout"},
    "static": {"rank", "store_timeout"},
    "etcd": ETCD_KEYS,
    "etcd-v2": ETCD_KEYS,
}
LARGEST = 1e9  # threads and sockets accept no time limit above about 292 years, and no infinite one


def number(parameters: RendezvousParameters, key: str, default: float) -> float:
    """Return a number above 0, for most keys seconds."""
    setting = parameters.get(key, default)
    try:
        value = float(setting)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value <= LARGEST:
        raise _wrong(key, setting, f"a number above 0, {LARGEST:,.0f} at most")
    return value


def whole(parameters: RendezvousParameters, key: str, default: int) -> int:
    """Return a whole number."""
    setting = parameters.get(key, default)
    try:
        return int(str(setting))
    except ValueError as error:
        raise _wrong(key, setting, "a whole number") from error


def choice(parameters: RendezvousParameters, key: str, choices: Sequence[str]) -> str:
    """Return one of the choices, the first one by default; upper case counts as lower case."""
    setting = parameters.get(key, choices[0])
    if str(setting).lower() not in choices:
        raise _wrong(key, setting, f"one of {', '.join(choices)}")
    return str(setting).lower()


def switch(parameters: RendezvousParameters, key: str) -> bool | None:
    """Return the value of a switch, None if it is not given."""
    try:
        return parameters.get_as_bool(key)
    except ValueError as error:
        raise _wrong(key, parameters.get(key), "1 or 0, true or false, yes or no") from error


def terms_of(parameters: RendezvousParameters, policy: Policy) -> Terms:
    """Return the settings that agents compare. Raises: ConfigurationError."""
    interval = number(parameters, "keep_alive_interval", 2)
    return Terms(
        parameters.min_nodes,
        parameters.max_nodes,
        number(parameters, "join_timeout", 600),
        number(parameters, "last_call_timeout", 30),
        interval,
        interval * number(parameters, "keep_alive_max_attempt", 4),
        policy,
    )


def keys_without_effect(conf: str, kind: str) -> list[str]:
    """Return the keys that nothing reads: misspelt ones, and those that only torchrun or another back end knows.

    conf: as given, because torch adds keys of its own; kind: of the back end."""
    given = {setting.partition("=")[0].strip() for setting in conf.split(",")} - {""}
    return sorted(given - KEYS - KEYS_OF[kind])


def _wrong(key: str, setting: object, expected: str) -> ConfigurationError:
    return ConfigurationError(f"--rdzv-conf {key} is {setting!r}, expected {expected}")
