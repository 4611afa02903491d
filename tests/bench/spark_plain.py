"""Plain Kafka → Delta append in a Spark that nobody has set up: `python -m tests.bench.spark_plain …`, seconds as JSON.

What the job's session has for settings makes plain appends faster, too. This says how fast they are without: the
connectors' jars and Delta's two settings are all that is given.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark.engine.session import connector_jars
from tests.bench import spark_kafka


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", action="append", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    told = parser.parse_args()
    spark = (
        SparkSession.builder.appName("plain")
        .config("spark.jars", ",".join(map(str, connector_jars())))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    seconds: list[float] = []

    def append(records: DataFrame, _: int) -> None:
        begun = time.monotonic()
        records.write.format("delta").mode("append").save(str(told.folder / "append"))
        seconds.append(time.monotonic() - begun)

    stream = spark_kafka.stream(spark, told.bootstrap, told.topic, told.size)
    spark_kafka.drain(stream.writeStream.foreachBatch(append), told.folder / "checkpoint")
    spark.stop()
    sys.stdout.write(json.dumps(seconds))


if __name__ == "__main__":
    main()
