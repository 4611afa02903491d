"""Fixtures that several test modules share, and how Hypothesis runs in all of them."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_spark"]

# A slow machine is no finding: how long an example takes is measured in benches.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")
# What commands print must not depend on whose terminal this is, or on whether tests run side by side.
os.environ.pop("COLUMNS", None)
