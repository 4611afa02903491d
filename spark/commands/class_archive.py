"""The classes of Spark in one file, which a session maps into memory instead of loading them from jars one by one.

That is HotSpot's dynamic archive (JEP 350); it takes a third off the time of a short command. It holds for the Java and
the jars that it was made with: with others the JVM passes it over, and loads its classes as ever.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.record_contract import HEADERS
from spark.engine.session import CLASSES, SHORT_LIVED, jars_folder, open_session

VALUES = (
    *("1.0", "00112233445566aa-0123456789ab-1", "/plant/gw-1", "sluice.reading", "device/42/thermo"),
    *("2026-03-14T12:00:00.000000Z", "1000", "estimated", "2026-03-14T12:00:00.000000Z"),
    *("5d0a1f7e", "123456789", "0123456789ab", "1", "application/json"),
)
"""Of the headers of a reading."""


def make_archive(path: Path) -> None:
    """Run what a session loads its classes for, on one reading, and have the JVM write them to a file at its end."""
    path.unlink(missing_ok=True)
    unfinished = path.with_suffix(".part")
    # What the JVM would warn of is which classes it cannot keep: hundreds, of which nobody need know.
    keeping = f'{SHORT_LIVED} -Xlog:disable -Xlog:all=error:stderr "-XX:ArchiveClassesAtExit={unfinished}"'
    os.environ["SLUICE_SPARK_JAVA_OPTIONS"] = keeping
    spark = open_session("sluice-classes")
    from spark.batch_job import BatchJob  # noqa: PLC0415
    from spark.decode.kafka_records import SOURCE_SCHEMA  # noqa: PLC0415
    from spark.engine.interpreted_queries import interpreted_if  # noqa: PLC0415
    from spark.log.log_table import BatchId  # noqa: PLC0415
    from spark.views.views import open_all  # noqa: PLC0415

    with TemporaryDirectory() as warehouse:
        headers = [(name, text.encode()) for name, text in zip(HEADERS, VALUES, strict=True)]
        record = (b"42", b'{"celsius": 21.5}', "device-thermo", 0, 0, datetime.now(UTC), 1, headers)
        job = BatchJob(spark, warehouse)
        job.take(spark.createDataFrame([record], SOURCE_SCHEMA), BatchId("classes", 0), {})
        job.save()
        with interpreted_if(spark, small=True):
            for table in open_all(spark, warehouse).values():
                table.limit(1).collect()
    jvm: Any = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no other way to wait for its JVM
    spark.stop()
    jvm.shutdown()
    jvm.proc.stdin.close()
    jvm.proc.wait()
    unfinished.replace(path)


if __name__ == "__main__":
    make_archive(jars_folder() / CLASSES)
