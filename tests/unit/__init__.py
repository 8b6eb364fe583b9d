"""Tests of small parts.

What hypothesis is told stands here, since modules that others import are imported before `conftest.py`.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says what else runs here
