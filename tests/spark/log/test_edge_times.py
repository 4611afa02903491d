"""Times of a few records in Python, against Spark's times of all readings."""

import random
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log import time_corrections
from spark.log.edge_times import Clocks, Correction, Moment, clocks
from spark.log.edges import Edge
from spark.log.time_corrections import current, retimed
from tests.support.sizes import size
from tests.support.spark_records import EPOCH, NOON

NOON_US = (NOON - EPOCH) // timedelta(microseconds=1)
UNKNOWN_US = 2**63 - 1


def test_a_moment_of_a_boot_is_reckoned_from_a_record_of_it() -> None:
    beat = Edge(NOON_US, 1_000, "synced", "gw-1", "boot-1", 60_000_000, None)
    other = beat._replace(gateway_boot="boot-2")
    known = clocks([], {("plant", "gw-1", "boot-1"): beat})
    # 20 s before, at 500 ppm: ten milliseconds.
    there = Moment(NOON_US - 20_000_000, 11_000)
    assert known.in_boot(("plant", "gw-1", "boot-1"), 40_000_000, other) == there
    assert Clocks().in_boot(("plant", "gw-1", "boot-1"), 40_000_000, beat) == there
    assert Clocks().in_boot(("plant", "gw-1", "boot-1"), 40_000_000, other).error_us == UNKNOWN_US


def drawn_correction(rng: random.Random, number: int) -> Correction:
    rate = rng.choice([0, rng.randrange(-200_000_000, 200_000_000), -(10**11)])
    growth = rng.choice([0, rng.randrange(500_000_000), 10**11])
    start_us = NOON_US - rng.choice([0, rng.randrange(10**9), 40 * 86_400 * 10**6])
    return Correction(
        *(rng.choice(["plant", "attic"]), "gw-1", rng.choice(["boot-1", "boot-2", "boot-3"]), rng.randrange(1, 4)),
        rng.choice(["synced", "bounded"]),
        rng.choice([0, rng.randrange(10**9), rng.randrange(-(2**63), 2**63)]),
        start_us,
        Decimal(rate).scaleb(-6),
        rng.choice([0, rng.randrange(5_000_000), UNKNOWN_US]),
        Decimal(growth).scaleb(-6),
        rng.random() < 0.3,
        NOON_US + rng.choice([0, 10**8, 10**10]),
        f"id-{number}",
    )


def drawn_edge(rng: random.Random) -> Edge:
    return Edge(
        NOON_US + rng.randrange(10**9),
        rng.choice([0, rng.randrange(10**6), 3_600_000_000, UNKNOWN_US]),
        rng.choice(["estimated", "received", "bounded", "device"]),
        *("gw-1", rng.choice(["boot-1", "boot-2", "boot-3", "boot-4"])),
        rng.choice([*(rng.randrange(-(10**8), 10**9) for _ in range(9)), rng.randrange(-(2**63), 2**63)]),
        rng.choice([None, None, 0, rng.randrange(10**5), UNKNOWN_US]),
    )


@pytest.mark.spark
@pytest.mark.campaign(seconds=15)
@settings(max_examples=size(1, 3), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 2**32))
def test_times_are_what_spark_makes_them(spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    told = [drawn_correction(rng, number) for number in range(10)]
    drawn = [(rng.choice(["plant", "attic"]), drawn_edge(rng)) for _ in range(400)]
    names = "event_us bigint, time_error_us bigint, time_quality string, gateway string, gateway_boot string"
    schema = f"number int, namespace string, {names}, boot_time_us bigint, boot_time_error_us bigint"
    rows = [(number, namespace, *edge) for number, (namespace, edge) in enumerate(drawn)]
    records = spark.createDataFrame(rows, schema).withColumns(
        {
            "event_time": F.timestamp_micros("event_us"),
            "kafka_timestamp": F.lit(None).cast("timestamp"),
            "event_date": F.lit(None).cast("date"),
        }
    )
    by_spark = retimed(records, current(spark.createDataFrame(told, time_corrections.SCHEMA)))
    found = by_spark.select("number", F.unix_micros("event_time").alias("us"), "time_error_us").collect()
    known = clocks(told, {})
    moments = [known.of(namespace, edge) for namespace, edge in drawn]
    assert {row.number: (row.us, row.time_error_us) for row in found} == dict(enumerate(moments))
    assert sum(moment.us != edge.event_us for moment, (_, edge) in zip(moments, drawn, strict=True))
