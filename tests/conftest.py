"""Fixtures that several test modules share."""

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_spark"]
