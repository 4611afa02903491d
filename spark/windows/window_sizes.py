"""Lengths of windows: that of the table, and those that its windows add up to. It needs no Spark."""

from spark.engine.told_error import ToldError

WINDOW_S = 60
"""Seconds of the table's windows, if `streams.toml` does not say."""
LATE_S = 60
"""Seconds after the end of its window from which a reading that reaches Kafka is late."""
DAY_S = 86_400
WINDOW_PROPERTY = "sluice.windowSeconds"
"""Property of the table with the seconds of its windows."""


class WindowSizeError(ToldError):
    """Windows of this size cannot be made; the message says which can."""


def chosen_size(size_s: int | None, base_s: int) -> int:
    """Return `size_s`, or by default the length of the table's windows. Raises WindowSizeError."""
    chosen_s = base_s if size_s is None else size_s
    if chosen_s <= 0 or chosen_s % base_s or DAY_S % chosen_s:
        raise WindowSizeError(
            f"windows of {chosen_s} s cannot be made from windows of {base_s} s: give a multiple that divides a day"
        )
    return chosen_s
