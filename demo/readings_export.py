"""Writes the rows of `readings` as JSON lines, for the audit: `python -m demo.readings_export WAREHOUSE FILE`.

It is a program of its own, so that the demo itself stays light and its Spark ends with it.
"""

import json
import sys
from pathlib import Path

from spark.engine.session import open_session
from spark.log.readings_view import open_readings


def export(warehouse: Path, target: Path) -> int:
    """Write one line for each row, and return their number.

    A line has device, boot, sequence, metric, event time in microseconds since 1970, value, bound and quality.
    """
    # Imported late: it takes a second, and whoever only imports this module need not wait for it.
    from pyspark.sql.functions import col, unix_micros  # noqa: PLC0415

    session = open_session("sluice-demo-audit")
    # The demo shows this program's output while it waits.
    print("Spark is up and looks for the tables", flush=True)
    try:
        rows = open_readings(session, str(warehouse)).select(
            col("device"),
            col("device_boot"),
            col("device_sequence"),
            col("metric"),
            unix_micros(col("event_time")),
            col("value").cast("double"),
            col("time_error_us"),
            col("time_quality"),
        )
        print("Spark reads the tables", flush=True)
        count = 0
        with target.open("w") as file:
            for row in rows.collect():
                file.write(json.dumps(list(row)) + "\n")
                count += 1
        return count
    finally:
        session.stop()


if __name__ == "__main__":
    print(export(Path(sys.argv[1]), Path(sys.argv[2])), "rows")
