"""Encodes a buffered row as a structured event: a CloudEvents 1.0 JSON event, for consumers that see only values.

The event has the texts that a binary record (`kafka.record`) has in its headers, under the names of CloudEvents'
attributes. They stay texts, because CloudEvents' integers have 32 bits.
"""

from base64 import b64encode
from typing import NamedTuple

import msgspec

from gateway.buffer.rows import Lane, Row, Series, StructuredEvents
from gateway.clock.gateway_clock import BootTimes
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_dates import TimeLimits, told_us
from gateway.kafka.event_data import fits_readers
from gateway.kafka.record import DOUBTS, ESTIMATED_ROUNDING_US, boottime_error, string, time_quality, varint
from gateway.reading import Datum
from gateway.record_contract import (
    BOOT_TIME_ERROR_HEADER,
    COUNTER_HEADER,
    DEVICE,
    DEVICE_ATTRIBUTE,
    DEVICE_HEADERS,
    DOUBT_HEADER,
    EVENT_CONTENT_TYPE,
    HEADERS,
    STREAM_ATTRIBUTE,
    TIME_ERROR_UNKNOWN_US,
    USER_ATTRIBUTE,
    VARIABLE_PREFIX,
    attribute_of,
    implied_counter,
    says_json,
)
from gateway.settings import GatewaySettings
from gateway.user_properties import of_text

_BLANKS = b" \t\r\n"


def _named(header: str) -> bytes:
    """A comma and an attribute's name: its value follows."""
    return b',"%b":' % attribute_of(header).encode()


def _attribute(header: str, text: str) -> bytes:
    return _named(header) + msgspec.json.encode(text)


_, _ID, _SOURCE, _TYPE, _SUBJECT, _TIME, _TIME_ERROR, _TIME_QUALITY, _RECEIVED, *_REST = map(_named, HEADERS)
_GATEWAY_BOOT, _BOOT_TIME, _LANE, _LANE_SEQUENCE, _CONTENT_TYPE = _REST
_DEVICE_BOOT, _DEVICE_SEQUENCE = map(_named, DEVICE_HEADERS)
_BOOT_TIME_ERROR = _named(BOOT_TIME_ERROR_HEADER)
_DOUBT = {number: _attribute(DOUBT_HEADER, word) for number, word in DOUBTS.items()}
# One header, which says that the value is an event.
_HEADERS = varint(1) + string(b"content-type") + string(EVENT_CONTENT_TYPE.encode())


class _Times(NamedTuple):
    """A row's times, as they go into its record."""

    event: bytes
    error_us: int
    quality: str
    received: bytes
    boottime_us: int
    boottime_error_us: int | None
    """None if the gateway's clock needs no correction."""


class StructuredEncoder:
    """Encodes the rows of one series in one lane. It is used as `RecordEncoder` is, for routes that want events."""

    __slots__ = (
        "_content_type",
        "_counter",
        "_encoded_key",
        "_from_gatewayboot",
        "_from_lane",
        "_from_source",
        "_is_json",
        "_limits",
        "_until_id",
        "boot_id",
        "key",
    )

    def __init__(self, gateway: GatewaySettings, lane: Lane, series: Series, structured: StructuredEvents) -> None:
        self.key = series.key.encode()
        self.boot_id = lane.boot_id
        self._encoded_key = string(self.key)
        self._limits = TimeLimits.of(gateway)
        self._is_json = says_json(series.content_type)
        self._until_id = b'{"specversion":"1.0"%b"%b-%b-' % (_ID, lane.buffer_id.encode(), lane.name.encode())
        self._from_source = (
            _SOURCE
            + msgspec.json.encode(f"/{gateway.namespace}/{gateway.id}")
            + _TYPE
            + msgspec.json.encode(series.type)
            + _SUBJECT
            + msgspec.json.encode(series.subject)
            + _attribute(DEVICE_ATTRIBUTE, series.device)
            + _attribute(STREAM_ATTRIBUTE, series.topic)
            + b"".join(_attribute(f"{VARIABLE_PREFIX}{name}", value) for name, value in structured.variables)
            + _TIME
        )
        self._from_gatewayboot = _GATEWAY_BOOT + msgspec.json.encode(lane.boot_id) + _BOOT_TIME
        self._from_lane = _LANE + msgspec.json.encode(lane.name) + _LANE_SEQUENCE
        self._content_type = _CONTENT_TYPE + msgspec.json.encode(series.content_type)
        implied = implied_counter(series.device, series.topic)
        self._counter = b"" if series.counter == implied else _attribute(COUNTER_HEADER, series.counter)

    def encode(self, row: Row, times: BootTimes, offset: int) -> bytes:
        """The record of one row. See `RecordEncoder.encode`."""
        datum = row.datum
        told = self._told(datum, times)
        pieces = [
            self._until_id,
            b'%d"' % row.sequence,
            self._from_source,
            b'"%b"%b"%d"%b"%b"%b"%b"'
            % (told.event, _TIME_ERROR, told.error_us, _TIME_QUALITY, told.quality.encode(), _RECEIVED, told.received),
            self._from_gatewayboot,
            b'"%d"' % told.boottime_us,
            self._from_lane,
            b'"%d"' % row.sequence,
            self._content_type,
        ]
        if datum.device_boot is not None and datum.device_sequence is not None:
            pieces += [
                _DEVICE_BOOT,
                msgspec.json.encode(datum.device_boot),
                _DEVICE_SEQUENCE,
                b'"%d"' % datum.device_sequence,
                self._counter,
            ]
        pieces.append(_DOUBT.get(datum.doubt, b""))
        if told.boottime_error_us is not None:
            pieces.append(b'%b"%d"' % (_BOOT_TIME_ERROR, told.boottime_error_us))
        if datum.properties is not None and of_text(datum.properties):
            pieces.append(_attribute(USER_ATTRIBUTE, datum.properties))
        if self._is_json and fits_readers(datum.payload):
            pieces += [b',"data":', datum.payload.strip(_BLANKS), b"}"]
        else:
            pieces += [b',"data_base64":"', b64encode(datum.payload), b'"}']
        # Attributes, and the distance from the batch's timestamp: both 0.
        record = b"".join((b"\0\0", varint(offset), self._encoded_key, string(b"".join(pieces)), _HEADERS))
        return string(record)

    def _told(self, datum: Datum, times: BootTimes) -> _Times:
        """A row's times by what is known now of the clock in its boot. `RecordEncoder` tells the same."""
        received_clock = times.around(datum.received_us)
        received = rfc3339(received_clock.at(datum.received_us))
        boottime_us = datum.received_us if datum.event_us is None else datum.event_us
        clock = times.around(boottime_us)
        device_time_us = told_us(datum, clock, self._limits)
        if device_time_us is not None:
            return _Times(rfc3339(device_time_us), datum.event_error_us, DEVICE, received, boottime_us, None)
        error_us, quality = time_quality(datum, clock, of_gateway=False)
        if clock.synced and datum.event_us is not None and datum.device_time_us is None:
            error_us = min(error_us | ESTIMATED_ROUNDING_US, TIME_ERROR_UNKNOWN_US)
        correction_error_us = None if clock.synced else boottime_error(datum, of_gateway=False)
        return _Times(rfc3339(clock.at(boottime_us)), error_us, quality, received, boottime_us, correction_error_us)
