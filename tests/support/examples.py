"""Which examples do tests draw?  The same ones in every run, and an example may take any time.

How long an example takes says something about the machine, not about the claim. `--hypothesis-profile random` draws
others. A test takes its profile when it is defined, so import this module before the tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "resilience", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("resilience")
