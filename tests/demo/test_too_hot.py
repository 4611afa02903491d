"""The example that reacts to a window: which windows are too hot, and that the gateway takes its commands."""

import hashlib
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession

from demo.too_hot import commands, too_hot
from gateway.command import DeviceCommand
from gateway.downlink.command_records import read_command
from tests.support.commands import Sent
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers

pytestmark = pytest.mark.spark


def test_a_device_whose_window_is_too_hot_gets_a_command(spark: SparkSession) -> None:
    hot = [(40, 0), (30, 5)]
    cold_on_the_mean = [(40, 10), (10, 15), (12, 19)]
    records = [
        reading(
            b'{"celsius": %d}' % celsius,
            reading_headers(number, time=NOON + timedelta(seconds=seconds)),
            offset=number,
            key=b"plant/42",
        )
        for number, (celsius, seconds) in enumerate([*hot, *cold_on_the_mean])
    ]
    copy = replace(records[2], offset=9)
    found = commands(too_hot(kafka_frame(spark, [*records, copy]), 30)).collect()
    (row,) = found
    assert row.topic == "gateway-commands.gw-1"
    sent = Sent(row.key.encode(), row.value.encode(), [(each.key, bytes(each.value)) for each in row.headers])
    command = read_command(sent, "plant")
    assert isinstance(command, DeviceCommand)
    assert (command.device, command.payload) == ("42", b"led=1")
    assert command.id == hashlib.sha256(f"plant/42/{int(NOON.timestamp())}".encode()).hexdigest()
    assert 0 < command.expires_us / 1e6 - time.time() < 120
