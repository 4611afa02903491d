"""Reads one Kafka record as it is: its time, device and values with their units, or why it would become no reading.

Times are as they were sent: corrections and copies are known to the tables alone.
"""

from dataclasses import dataclass, field

from gateway.record_contract import READING_TYPE
from spark.decode.codec_avro import RegistryError
from spark.decode.codec_declarations import Streams
from spark.decode.codec_numbers import Value
from spark.decode.codec_plain import PayloadReader
from spark.decode.record_rules import Headers, Reader, typed


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One record. None stands for a header that is missing or no such value."""

    device: str | None
    """The record's key, without the namespace."""
    gateway: str | None
    type: str | None
    """`ce_type`."""
    event_us: int | None
    """Time of the reading, in microseconds since 1970."""
    time_error_us: int | None
    time_quality: str | None
    metrics: list[Value] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    """Units of the metrics that are declared with one."""
    undeclared: list[str] = field(default_factory=list)
    reject_reason: str | None = None
    """The reason why the record would be no reading, as far as a record alone shows it."""

    @property
    def is_reading(self) -> bool:
        return self.type == READING_TYPE


def read_record(  # noqa: PLR0913, PLR0917 - the fields of a Kafka record
    topic: str, kafka_us: int, key: bytes | None, value: bytes | None, headers: Headers, streams: Streams
) -> ReadRecord:
    """Read a record by the declarations of its topic. `kafka_us` is when Kafka took it in."""
    record = typed(topic, 0, 0, kafka_us, key, value, headers)
    try:
        Reader(streams).read(record)
    except RegistryError as error:
        record.reject_reason = f"the schema registry gives no schema: {error}"
    error_us = record.time_error_us
    stream = PayloadReader(streams).declaration(record.stream or topic) if record.metrics else None
    return ReadRecord(
        device=record.device,
        gateway=record.gateway,
        type=record.ce_type,
        event_us=record.event_us,
        time_error_us=None if error_us is None or error_us < 0 else error_us,
        time_quality=record.time_quality,
        metrics=record.metrics or [],
        units={metric.name: metric.unit for metric in stream.metrics if metric.unit} if stream else {},
        undeclared=record.undeclared or [],
        reject_reason=record.reject_reason,
    )
