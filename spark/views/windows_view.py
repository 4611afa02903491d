"""`windows` as an analyst reads them: one row for each, of any size that the table's windows add up to."""

from pyspark.sql import DataFrame, SparkSession

from spark.finality.window_status import with_status
from spark.log.warehouse_version import Version, open_version, tables_of
from spark.views.evidence import read_evidence
from spark.windows.windows_table import DAY_S, folded, read_parts, shown, window_seconds


class WindowSizeError(Exception):
    """Windows of this size cannot be had; the message says which can."""


def open_windows(
    spark: SparkSession, warehouse: str, size_s: int | None = None, version: Version | None = None
) -> DataFrame:
    """Return the warehouse's windows, which SQL then finds as the temporary view `windows`.

    `size_s` is their length; without it, that of the table. `status` says whether one is final, `basis` what stands
    behind that, and `why` what it waits for, as of now: opened anew, the view knows what came since. Raises
    WindowSizeError.
    """
    version = version or open_version(spark, warehouse)
    tables = tables_of(warehouse, version)
    base_s = window_seconds(spark, tables)
    chosen_s = base_s if size_s is None else size_s
    if chosen_s % base_s or DAY_S % chosen_s:
        raise WindowSizeError(
            f"windows of {chosen_s} s cannot be had from windows of {base_s} s: take a multiple that divides a day"
        )
    # Before the windows: so they hold all that it speaks of.
    evidence = read_evidence(spark, warehouse, version)
    view = shown(folded(read_parts(spark, tables), chosen_s), chosen_s, version.streams.windows.percentiles)
    view = with_status(view, evidence)
    view.createOrReplaceTempView("windows")
    return view
