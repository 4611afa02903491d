"""An example: a Spark stream that commands a device whose readings were too hot for a while.

    python -m demo.too_hot --bootstrap kafka.example:9092 --limit 30 --checkpoint /data/too-hot

For each device and 10 s of event time it takes the mean. If that is above the limit, it sends `led=1` to the device, by
the gateway that brought the readings. It reads Kafka itself, for the tables of `ingest` come some seconds later.
"""

from datetime import timedelta

import click
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import (
    COMMAND_EXPIRES_HEADER,
    COMMAND_ID_HEADER,
    COMMANDS_TOPIC,
)
from spark.engine.session import open_session

WINDOW = "10 seconds"
LATE = "5 seconds"
"""A window is judged once readings of so much later have come. Readings that come later still are left out."""
RFC_3339 = "yyyy-MM-dd'T'HH:mm:ss'Z'"
"""The session's times are UTC."""
LASTS = timedelta(minutes=1)
"""A command that does not reach the device by then is not worth acting on."""


def too_hot(records: DataFrame, limit: float) -> DataFrame:
    """Windows whose mean is above the limit. `records` are those of Kafka, with their headers."""
    told = F.map_from_entries(F.transform("headers", lambda each: F.struct(each["key"], each["value"].cast("string"))))
    source = F.split(F.element_at(told, "ce_source"), "/")
    return (
        records.select(
            F.to_timestamp(F.element_at(told, "ce_time")).alias("time"),
            F.element_at(told, "ce_id").alias("id"),
            F.element_at(source, 2).alias("namespace"),
            F.element_at(source, 3).alias("gateway"),
            F.element_at(F.split(F.col("key").cast("string"), "/"), -1).alias("device"),
            F.get_json_object(F.col("value").cast("string"), "$.celsius").cast("double").alias("celsius"),
        )
        .withWatermark("time", LATE)
        # A gateway may send a record again, under the same id.
        .dropDuplicates(["id", "time"])
        .groupBy(F.window("time", WINDOW), "namespace", "gateway", "device")
        .agg(F.avg("celsius").alias("mean"))
        .where(F.col("mean") > limit)
    )


def commands(windows: DataFrame) -> DataFrame:
    """A command for each window, as Kafka takes it. If Spark sends one again, it has the same id."""
    command_id = F.sha2(F.concat_ws("/", "namespace", "device", F.unix_timestamp("window.start")), 256)
    expires = F.unix_timestamp() + LASTS.seconds
    return windows.select(
        F.replace(F.lit(COMMANDS_TOPIC), F.lit("{gateway}"), F.col("gateway")).alias("topic"),
        F.concat_ws("/", "namespace", "device").alias("key"),
        F.lit("led=1").alias("value"),
        F.array(
            F.struct(F.lit(COMMAND_ID_HEADER).alias("key"), command_id.cast("binary").alias("value")),
            F.struct(
                F.lit(COMMAND_EXPIRES_HEADER).alias("key"),
                F.from_unixtime(expires, RFC_3339).cast("binary").alias("value"),
            ),
        ).alias("headers"),
    )


@click.command()
@click.option("--bootstrap", required=True, help="Addresses of Kafka brokers.")
@click.option("--topic", default="device-thermo", show_default=True, help="Topic of the readings.")
@click.option("--limit", required=True, type=float, help="Degrees above which a window is too hot.")
@click.option("--checkpoint", required=True, help="Folder in which Spark keeps how far it has come.")
def main(bootstrap: str, topic: str, limit: float, checkpoint: str) -> None:
    """Command devices whose readings are too hot, until Ctrl-C."""
    kafka = {"kafka.bootstrap.servers": bootstrap}
    spark = open_session("too-hot")
    records = spark.readStream.format("kafka").options(**kafka, subscribe=topic, includeHeaders="true").load()
    stream = commands(too_hot(records, limit)).writeStream.format("kafka").options(**kafka)
    stream.option("checkpointLocation", checkpoint).trigger(processingTime="2 seconds").start().awaitTermination()


if __name__ == "__main__":
    main()
