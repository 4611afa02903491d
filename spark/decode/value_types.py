"""Spark's types of values and metrics. It needs no Spark."""

VALUE_TYPE = "decimal(18,6)"
"""Type of values. They are rounded half up to six decimals or fewer, so that sums are the same in any order."""
METRICS_TYPE = f"array<struct<name:string,value:{VALUE_TYPE},ago_us:bigint>>"
"""Type of a reading's metrics, ordered by name. `ago_us` is the time from when a value was taken to the record's event
time, in microseconds; null if it was taken at that time."""
