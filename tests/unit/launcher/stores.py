"""A torch Store's methods on a dict, where the tests decide what happens between two operations."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

MOST = 100_000  # operations of one test


class Killed(BaseException):
    """An agent dies."""


class Store:
    """before: called before each operation. operations: how many there were."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.operations = 0
        self.before: Callable[[], None] = lambda: None

    def set(self, key: str, value: str) -> None:
        self._begin()
        self.data[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._begin()
        return self.data[key]

    def add(self, key: str, amount: int) -> int:
        self._begin()
        total = int(self.data.get(key, b"0")) + amount
        self.data[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        self._begin()
        return all(key in self.data for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise AssertionError("nobody is to wait")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._begin()
        if self.data.get(key, b"") == expected_value.encode():
            self.data[key] = desired_value.encode()
        return self.data.get(key, expected_value.encode())

    def delete_key(self, key: str) -> bool:
        self._begin()
        return self.data.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._begin()
        return [self.data[key] for key in keys]  # a real one waits for those that are not there

    def _begin(self) -> None:
        self.operations += 1
        assert self.operations < MOST, f"more than {MOST} operations"
        self.before()
