"""`windows` for analysts: one row for each window, of any size that the table's windows add up to."""

from pyspark.sql import DataFrame, SparkSession

from spark.finality.window_status import with_status
from spark.log.warehouse_version import Version, open_version, tables_of
from spark.views.evidence import read_evidence
from spark.windows.window_sizes import chosen_size
from spark.windows.windows_table import folded, read_parts, shown, window_seconds


def open_windows(
    spark: SparkSession, warehouse: str, size_s: int | None = None, version: Version | None = None
) -> DataFrame:
    """Return the warehouse's windows, and register them as the temporary view `windows`.

    `size_s` is their length in seconds, by default that of the table's windows. `status` says whether a window is
    final, `basis` why that is known, and `why` what the window waits for. All is as of now: open the view again to see
    later records. Raises WindowSizeError.
    """
    version = version or open_version(spark, warehouse)
    tables = tables_of(warehouse, version)
    chosen_s = chosen_size(size_s, window_seconds(spark, tables))
    # Before the windows, so that they hold every record that the evidence names.
    evidence = read_evidence(spark, warehouse, version)
    view = shown(folded(read_parts(spark, tables), chosen_s), chosen_s, version.streams.windows.percentiles)
    view = with_status(view, evidence)
    view.createOrReplaceTempView("windows")
    return view
