"""Measures records of a simulated gateway: what a reading takes in Kafka's log, by the size of its batch.

Sensors are those of `sluice-sim fleet`, and records are encoded and batched as a gateway does it. There is no MQTT
connection and no buffer between them: one gateway alone has its own bench.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

from aiokafka.partitioner import murmur2

from gateway.buffer.rows import Lane, Row, Series
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.intake import payload_identity
from gateway.intake.routes import kafka_key
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.mqtt.packet_reader import PacketReader, message
from gateway.reading import Datum
from gateway.record_contract import READING_TYPE
from gateway.settings import GatewaySettings
from sluice_sim.fleet_faults import boot_of
from sluice_sim.mqtt_sensor import MqttSensor
from tests.bench.context import Bench
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result

SENSORS, SENSORS_QUICK = 500, 50
"""Of each gateway."""
ROUNDS, ROUNDS_QUICK = 30, 4
"""Readings of each sensor."""
INTERVAL_S = 60.0
"""Seconds between two readings of a sensor, in the readings' time."""
BATCH_ROWS = (1, 4, 10, 100, 1_000)
SEED = 1
CONNACK = b"\x20\x02\x00\x00"
PACKET_BYTES_MAX = 1_000


async def scale(bench: Bench) -> list[Result]:
    """Measure a reading's bytes in Kafka's log, by the readings that came with it in one batch of one gateway."""
    sensors, rounds = bench.pick(SENSORS, SENSORS_QUICK), bench.pick(ROUNDS, ROUNDS_QUICK)
    return await asyncio.to_thread(_batch_bytes, sensors, rounds)


def _batch_bytes(sensors: int, rounds: int) -> list[Result]:
    """Bytes that a reading has in Kafka's log, by the readings that came with it in one batch of one gateway."""
    results = []
    for rows in BATCH_ROWS:
        site, batch = Site(0, "scale", 1, sensors), EncodedBatch("zstd")
        count = total = 0
        for round_ in range(rounds):
            for sensor, row in site.rows(round_):
                site.encode(sensor, row, batch)
                if len(batch.records) == rows:
                    count, total = count + rows, total + len(batch._build())
                    batch = EncodedBatch("zstd")
        if count:
            results.append(Result(f"scale_log_bytes_per_reading_in_batches_of_{rows}", total / count, "bytes"))
    return results


# -- gateways -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sensor:
    """One sensor, and the encoder that its gateway has for it."""

    sensor: MqttSensor
    encoder: RecordEncoder
    partition: int


class Site:
    """One gateway with its sensors."""

    def __init__(self, number: int, topic: str, partitions: int, sensors: int) -> None:
        settings = GatewaySettings(f"gw-{number:03d}", namespace=f"site-{number:03d}", key="namespace/name")
        lane = Lane(1, f"{number:012x}", f"boot-{number}", f"{number:016x}")
        self._random = random.Random(number)  # noqa: S311 - what sensors measure, no secret
        self._times = BootTimes(BootClock.constant(1_700_000_000_000_000, 1_000))
        self._reader = PacketReader(PACKET_BYTES_MAX)
        self._sequence = 0
        self._sensors = []
        for place in range(1, sensors + 1):
            name = f"m{place:03d}"
            sensor = MqttSensor(name, boot_of(SEED, name, 1), seed=SEED)
            sensor.connect()
            sensor.receive(CONNACK)
            key, subject = kafka_key(settings, name), f"device/{name}/thermo"
            series = Series(topic, key, name, subject, READING_TYPE, "application/json", subject)
            partition = (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
            self._sensors.append(_Sensor(sensor, RecordEncoder(settings, lane, series), partition))

    def batches(self, round_: int) -> dict[int, EncodedBatch]:
        """A reading of each sensor, by partition."""
        batches: dict[int, EncodedBatch] = {}
        for sensor, row in self.rows(round_):
            self.encode(sensor, row, batches.setdefault(sensor.partition, EncodedBatch("zstd")))
        return batches

    def encode(self, sensor: _Sensor, row: Row, batch: EncodedBatch) -> None:
        """Add a reading to a batch."""
        batch.add(sensor.encoder.encode(row, self._times, len(batch.records)))

    def rows(self, round_: int) -> Iterator[tuple[_Sensor, Row]]:
        """A reading of each sensor, through an MQTT packet."""
        step_s = INTERVAL_S / len(self._sensors)
        for place, each in enumerate(self._sensors):
            now_us = int((round_ * INTERVAL_S + (place + self._random.random()) * step_s) * 1e6)
            packet = each.sensor.sample(20 + self._random.random(), now_us // 1_000)
            (parsed,) = self._reader.receive(packet)
            published = message(parsed)
            each.sensor.receive(b"\x40\x02" + published.packet_id.to_bytes(2, "big"))
            identity = payload_identity.of_json(published.payload)
            if identity is None:
                raise NotMeasuredError(f"the fleet's sensors send no identity: {published.payload!r}")
            datum = Datum(
                received_us=now_us,
                event_us=now_us,
                event_error_us=1_000,
                device_boot=identity.boot,
                device_sequence=identity.seq,
                payload=published.payload,
            )
            yield each, Row(1, self._sequence, 0, datum)
            self._sequence += 1
