"""Hypothesis draws the same examples each time, and no example fails because the machine is busy.

`pytest --hypothesis-profile=default` draws new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
