"""Compares windows and readings with the same time of day on past days, of the same device, stream and metric.

Days are UTC days of 24 hours. Everything is computed from the tables as they stand, so a late reading of last week
shows in the comparison. `history_touched` tells a job that stores such results which of them to compute again.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.windows.windows_table import DAY_US, METRIC, start_of, sums_of_values, unwindowed

HOUR_S = 3_600
DAYS_MAX = 3_660
PROVISIONAL = "provisional"
HISTORY = ("history_days", "history_n", "history_min", "history_max", "history_sum", "history_mean")


def with_history(windows: DataFrame, days: int, history: DataFrame | None = None) -> DataFrame:
    """Add to each window the figures of the windows at its time of day on the `days` days before.

    `history_days` counts the days with readings. `history_n`, `history_min`, `history_max` and `history_sum` are those
    of all past windows. `history_mean` is their sum divided by n, rounded half up to the decimals of the sum. If
    `windows` has `status`, `history_provisional` counts the past windows that are not final. If no past day has
    readings, the counts are 0 and the rest is null. If one of the sums is null, `history_sum` and the mean are null.

    `history` holds the past windows, by default `windows` itself. Windows of several lengths are kept apart. Raises
    ValueError for `days` out of range.
    """
    _check_days(days)
    given = windows.select("*", F.lit(True).alias("_shown"), F.lit(history is None).alias("_past"))
    if history is not None:
        needed = [name for name in (*METRIC, *_READ, "status") if name in windows.columns]
        concerned = history.join(windows.select(*METRIC).distinct(), list(METRIC), "left_semi").select(*needed)
        past = concerned.select("*", F.lit(False).alias("_shown"), F.lit(True).alias("_past"))
        given = given.unionByName(past, allowMissingColumns=True)
    start_us = F.unix_micros("window_start")
    placed = given.withColumns(
        {
            "_length_us": F.unix_micros("window_end") - start_us,
            "_clock_us": F.pmod(start_us, F.lit(DAY_US)),
            "_day": _day(start_us),
        }
    )
    before = Window.partitionBy(*METRIC, "_length_us", "_clock_us").orderBy("_day").rangeBetween(-days, -1)

    def past_of(column: str) -> Column:
        return F.when(F.col("_past"), F.col(column))

    total = F.when(
        F.count(past_of("sum")).over(before) == F.count(past_of("n")).over(before), F.sum(past_of("sum")).over(before)
    )
    figures = {
        "history_days": F.size(F.collect_set(past_of("_day")).over(before)),
        "history_n": F.coalesce(F.sum(past_of("n")).over(before), F.lit(0)),
        "history_min": F.min(past_of("min")).over(before),
        "history_max": F.max(past_of("max")).over(before),
        "history_sum": total,
    }
    if "status" in windows.columns:
        provisional = F.when(F.col("_past") & (F.col("status") == PROVISIONAL), F.lit(1))
        figures["history_provisional"] = F.count(provisional).over(before)
    found = placed.withColumns(figures).where("_shown")
    mean = F.col("history_sum") / F.nullif("history_n", F.lit(0))
    further = ["history_provisional"] if "status" in windows.columns else []
    return found.select(*windows.columns, *HISTORY[:-1], mean.alias("history_mean"), *further)


_READ = ("window_start", "window_end", "n", "min", "max", "sum")


def with_same_hour(readings: DataFrame, days: int) -> DataFrame:
    """Add to each reading the figures of the same hour on the `days` days before, as `with_history` does.

    Readings whose time is unknown or implausible get nulls, and count for no other reading.
    """
    hour = F.when(~unwindowed(), start_of(F.col("event_time"), HOUR_S))
    timed = readings.withColumn("_hour", hour)
    hours = (
        timed.where(F.col("_hour").isNotNull())
        .groupBy(*METRIC, F.col("_hour").alias("window_start"))
        .agg(*sums_of_values())
        .withColumn("window_end", F.timestamp_micros(F.unix_micros("window_start") + HOUR_S * 1_000_000))
    )
    compared = with_history(hours, days).select(*METRIC, F.col("window_start").alias("_hour"), *HISTORY)
    return timed.join(compared, [*METRIC, "_hour"], "left").select(*readings.columns, *HISTORY)


def history_touched(changed_windows: DataFrame, days: int) -> DataFrame:
    """Name the windows whose row in `with_history` changes when these windows change, appear or go.

    These are the windows themselves, and those at their time of day on the `days` days after. The columns are
    `namespace`, `device`, `stream`, `metric`, `window_start` and `window_end`, without duplicates. A named window may
    have no readings.
    """
    _check_days(days)
    later_us = F.explode(F.sequence(F.lit(0), F.lit(days * DAY_US), F.lit(DAY_US))).alias("_later_us")
    moved = changed_windows.select(*METRIC, "window_start", "window_end").distinct().select("*", later_us)
    return moved.select(
        *METRIC,
        *(
            F.timestamp_micros(F.unix_micros(name) + F.col("_later_us")).alias(name)
            for name in ("window_start", "window_end")
        ),
    ).distinct()


def _check_days(days: int) -> None:
    if not 1 <= days <= DAYS_MAX:
        raise ValueError(f"{days} days cannot be looked back: give 1 to {DAYS_MAX} days")


def _day(time_us: Column) -> Column:
    """The number of a day since 1970."""
    return F.unix_date(F.to_date(F.timestamp_micros(time_us)))
