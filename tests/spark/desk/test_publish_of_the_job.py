"""Published tables hold what the views do, whatever Spark's own job did to the warehouse."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.decode.streams_file import parse_streams
from spark.engine.warehouse_folder import only_writer
from spark.log.log_table import BatchId
from spark.upkeep.device_deletion import delete_device
from spark.upkeep.quarantine_retry import retry
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import maintain
from tests.spark.desk.test_publish import Compared
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, correction, kafka_frame, reading, reading_headers

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long(seconds=160),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("interpreted"),
]

PACKS = 'unknown = "accept"\n[streams."device-pack"]\ncodec = "senml-json"\n'
TOO_NARROW = f'{PACKS}[streams."device-thermo"]\ncodec = "json"\nmetrics.t = {{ max = 9 }}\n'
OLD = f"{PACKS}[retention]\nlog_days = 30\nwindows_days = 30\n"


def sent(number: int, days: float, device: str = "42", **changes: object) -> KafkaRecord:
    """A reading, so many days after noon."""
    time = NOON + timedelta(days=days)
    headers = reading_headers(number, time=time, lane=f"{int(device):012x}", **changes)  # type: ignore[arg-type]
    headers = [(name, f"device/{device}/thermo".encode() if name == "ce_subject" else text) for name, text in headers]
    record = reading(b'{"t": %d.5}' % number, headers, offset=100 * int(device) + number, key=device.encode())
    return replace(record, timestamp=max(time, NOON) + timedelta(seconds=1))


def heartbeat(number: int, days: float) -> KafkaRecord:
    """The gateway has delivered everything up to a time."""
    time = NOON + timedelta(days=days)
    told = {
        "offsets": {},
        "pending": [],
        "quarantined": [],
        "low_watermark": f"{time:%Y-%m-%dT%H:%M:%S.%fZ}",
        "depth_rows": 0,
        "oldest_age_s": None,
    }
    headers = reading_headers(number, time=time, lane="e" * 12, event_type="sluice.gateway.heartbeat")
    record = reading(json.dumps(told).encode(), headers, offset=number, key=b"gw-1")
    return replace(record, topic="gateway-events", timestamp=time + timedelta(seconds=1))


class Job(Compared):
    """A warehouse that the job writes, and the folder that it is published to."""

    def __init__(self, spark: SparkSession, warehouse: str, folder: Path) -> None:
        super().__init__(Path(warehouse), folder)
        self.spark = spark
        self.batches = 0
        self.open(PACKS)

    def open(self, declared: str) -> None:
        self.job = BatchJob(self.spark, str(self.path), parse_streams(declared, Path("streams.toml")))

    def take(self, *records: KafkaRecord) -> None:
        self.job.take(kafka_frame(self.spark, records), BatchId("query", self.batches), {})
        self.job.save()
        self.batches += 1


def test_whatever_the_job_changes_is_published(spark: SparkSession, new_warehouse: str, tmp_path: Path) -> None:
    site = Job(spark, new_warehouse, tmp_path / "published")
    site.take(*(sent(number, number - 3) for number in (1, 2, 3)), sent(1, -2, "43"), sent(2, 0, "43"))
    assert site.publish() == {"readings": [-2, -1, 0], "windows": [-2, -1, 0]}

    site.take(sent(4, -1.1))
    assert site.publish() == {"readings": [-1], "windows": [-1]}

    # The gateway's clock was wrong: a reading of two days ago was taken at noon.
    site.take(sent(5, -2, boot_error_us=0, boot_us=60_000_000, error_us=10**12, quality="bounded"))
    assert site.publish()["readings"] == [-2]
    site.take(correction(900, {}, told=NOON + timedelta(hours=1)))
    written = site.publish()
    assert {-2, 0} <= {*written["readings"]}
    assert {-2, 0} <= {*written["windows"]}

    # Values from before and after midnight, sent together.
    pack = [{"n": "t", "v": 1, "t": -7200}, {"n": "t", "v": 2, "t": 0}]
    at_one = sent(6, 0.55, content_type="application/senml+json")
    site.take(replace(at_one, topic="device-pack", value=json.dumps(pack).encode(), offset=6))
    written = site.publish()
    assert written["readings"] == [0, 1]
    # A stream that nobody acknowledged yet is evidence of all days.
    assert {0, 1} <= {*written["windows"]}

    # The same reading again, with a time of another day that is known better: it counts instead.
    site.take(sent(7, -1, device_boot="b1", error_us=50_000))
    assert site.publish()["readings"] == [-1]
    again = sent(7, 0, device_boot="b1", error_us=10, buffer="f" * 16)
    site.take(replace(again, offset=999))
    assert {-1, 0} <= {*site.publish()["readings"]}

    # Rejects, which are read again by other declarations.
    site.open(TOO_NARROW)
    site.take(sent(8, -1), sent(9, -2))
    assert -1 in site.publish()["readings"]
    site.open(PACKS)
    assert retry(site.job).read == 1
    assert -2 in site.publish()["readings"]

    # Nothing new but the word of the gateway: windows become final.
    site.take(heartbeat(1, -0.6))
    written = site.publish()
    assert written["readings"] == []
    assert {-2, -1} <= {*written["windows"]}

    delete_device(spark, new_warehouse, "plant", "43")
    written = site.publish()
    assert {-2, 0} <= {*written["readings"]}
    assert {-2, 0} <= {*written["windows"]}

    site.open(OLD)
    maintain(site.job, NOON.date() + timedelta(days=31))
    site.take(sent(10, 1.5))
    site.publish()
    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)
    site.publish()
    assert site.publish() == {"readings": [], "windows": []}
