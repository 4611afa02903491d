"""Encodes a buffered row as a Kafka record: a CloudEvents 1.0 event in Kafka's binary content mode.

The value is the sensor's payload, byte for byte. What the gateway knows stands in the headers, in a fixed order.
Records are encoded here, in message format 2 (Kafka's documentation, "Record"). Most of a record is common to its
series, and is encoded once. A client library that is given headers cannot know that.
"""

from functools import lru_cache

from gateway.buffer.rows import Lane, Row, Series
from gateway.clock.gateway_clock import FOREVER_US, BootTimes, WallClock
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_dates import TimeLimits, told_us
from gateway.reading import Datum, Doubt
from gateway.record_contract import (
    BOOT_TIME_ERROR_HEADER,
    CONFLICT,
    COUNTER_HEADER,
    DEVICE,
    DEVICE_HEADERS,
    DOUBT_HEADER,
    HEADERS,
    REDELIVERED,
    TIME_ERROR_UNKNOWN_US,
    USER_PREFIX,
    VARIABLE_PREFIX,
    implied_counter,
)
from gateway.settings import GatewaySettings
from gateway.user_properties import of_text

ESTIMATED_ROUNDING_US = 127
"""Most microseconds by which the bound of an estimated time is rounded up, so that few different bounds are encoded."""

_RFC3339_BYTES = 27
_SEQUENCE_DIGITS_MAX = 19


def _zigzag_varint(number: int) -> bytes:
    """A non-negative number in the form of Kafka's records: zigzag, then seven bits a byte, least significant first."""
    number <<= 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_VARINTS = tuple(_zigzag_varint(number) for number in range(8192))


def varint(number: int) -> bytes:
    """A number as `_zigzag_varint` encodes it."""
    return _VARINTS[number] if number < len(_VARINTS) else _zigzag_varint(number)


def string(value: bytes) -> bytes:
    """A string with its length before it. Keys, values, and headers' names and values have this form."""
    return varint(len(value)) + value


def _name(text: str) -> bytes:
    """A header's name; its value follows."""
    return string(text.encode())


def _header(name: bytes, value: str) -> bytes:
    return name + string(value.encode())


_SPEC_VERSION, _ID, _SOURCE, _TYPE, _SUBJECT, _TIME, _TIME_ERROR, _TIME_QUALITY, *_REST = map(_name, HEADERS)
_RECEIVED_TIME, _GATEWAY_BOOT, _BOOT_TIME, _LANE, _LANE_SEQUENCE, _CONTENT_TYPE = _REST
_DEVICE_BOOT, _DEVICE_SEQUENCE = map(_name, DEVICE_HEADERS)
_COUNTER, _DOUBT, _BOOT_TIME_ERROR = map(_name, (COUNTER_HEADER, DOUBT_HEADER, BOOT_TIME_ERROR_HEADER))


@lru_cache(maxsize=16)
def _quality(word: str) -> bytes:
    """The header of how a time was obtained, and the beginning of the next header: the time of receipt follows."""
    return _header(_TIME_QUALITY, word) + _RECEIVED_TIME + varint(_RFC3339_BYTES)


@lru_cache(maxsize=16)
def _until_id(prefix: bytes) -> tuple[bytes, ...]:
    """The beginning of a lane's records, up to the sequence that ends their id; by the sequence's number of digits."""
    specversion = _header(_SPEC_VERSION, "1.0") + _ID
    return tuple(specversion + varint(len(prefix) + digits) + prefix for digits in range(_SEQUENCE_DIGITS_MAX + 1))


@lru_cache(maxsize=4096)
def _estimated(error_us: int) -> bytes:
    """The headers of an estimated time's bound and quality, up to the time of receipt that follows."""
    error_us = min(error_us, TIME_ERROR_UNKNOWN_US)
    return _TIME_ERROR + string(b"%d" % error_us) + _quality("estimated")


@lru_cache(maxsize=128)
def _user_headers(properties: str) -> tuple[int, bytes]:
    """Number of the headers of user properties, and these headers. Many sensors send the same ones each time."""
    pairs = of_text(properties)
    return len(pairs), b"".join(_header(_name(f"{USER_PREFIX}{name}"), value) for name, value in pairs)


class RecordEncoder:
    """Encodes the rows of one series in one lane.

    The part that all of them share is encoded once. So is the part that successive rows share if one packet brought
    them and they have one time of receipt.
    """

    __slots__ = (
        "_boottime_error",
        "_content_type_and_variables",
        "_counter",
        "_device_boot",
        "_encoded_key",
        "_estimated_clock",
        "_event_clock",
        "_event_s",
        "_from_content_type_to_devicesequence",
        "_from_gatewayboot_to_boottime",
        "_from_lane_to_lanesequence",
        "_from_source_to_lanesequence",
        "_from_source_to_time",
        "_from_timeerror_to_receivedtime",
        "_headers",
        "_headers_numbered",
        "_limits",
        "_of_gateway",
        "_quality_of",
        "_received",
        "_received_clock",
        "_received_us",
        "_times",
        "_times_of",
        "_until_event_us",
        "_until_id",
        "boot_id",
        "key",
        "topic",
    )

    def __init__(self, gateway: GatewaySettings, lane: Lane, series: Series) -> None:
        self.topic = series.topic
        self.key = series.key.encode()
        self.boot_id = lane.boot_id
        self._of_gateway = series.is_of_gateway
        self._limits = TimeLimits.of(gateway)
        self._encoded_key = string(self.key)
        self._until_id = _until_id(f"{lane.buffer_id}-{lane.name}-".encode())
        self._from_source_to_time = (
            _header(_SOURCE, f"/{gateway.namespace}/{gateway.id}")
            + _header(_TYPE, series.type)
            + _header(_SUBJECT, series.subject)
            + _TIME
            + varint(_RFC3339_BYTES)
        )
        self._from_gatewayboot_to_boottime = _header(_GATEWAY_BOOT, lane.boot_id) + _BOOT_TIME
        self._from_lane_to_lanesequence = _header(_LANE, lane.name) + _LANE_SEQUENCE
        self._content_type_and_variables = _header(_CONTENT_TYPE, series.content_type) + b"".join(
            _header(_name(f"{VARIABLE_PREFIX}{name}"), value) for name, value in series.variables
        )
        self._headers = len(HEADERS) + len(series.variables)
        self._headers_numbered = self._headers + len(DEVICE_HEADERS)
        implied = implied_counter(series.device, series.topic)
        self._counter = b"" if series.counter == implied else _header(_COUNTER, series.counter)
        self._times_of: tuple[object, ...] = ()
        self._times: BootTimes | None = None
        self._from_source_to_lanesequence = b""
        """Of the last row: the headers from `ce_source` to `ce_lanesequence`, by `_times_of` and `_times`."""
        self._event_clock = self._received_clock = _NO_SPAN
        """The clock around the last row's event and receipt."""
        self._estimated_clock = _NO_SPAN
        """The clock around the last estimated time, of a boot that was synced."""
        self._event_s: int | None = None
        self._until_event_us = b""
        """Of the last estimated row: the second of its event by wall time, and all from `ce_source` to that second."""
        self._received_us: int | None = None
        self._received = b""
        """Of the last row: its receipt, and that receipt as wall time by `_times`."""
        self._quality_of: tuple[object, ...] = ()
        self._from_timeerror_to_receivedtime = b""
        self._boottime_error = b""
        """Of the last row: the facts behind its time's quality, and the two parts of the record that follow from
        them."""
        self._device_boot: str | None = None
        self._from_content_type_to_devicesequence = b""
        """Of the last row with a number: its boot, and the headers from `content-type` to `ce_devicesequence`."""

    def encode(self, row: Row, times: BootTimes, offset: int) -> bytes:
        """The record of one row. Its times follow from what is known now of the clock in its boot.

        `offset` is its place in its batch. Kafka's own timestamp is that of the batch, which the broker sets
        (LogAppendTime).
        """
        datum, event_us = row.datum, row.datum.event_us
        boot, device_sequence, payload = datum.device_boot, datum.device_sequence, datum.payload
        times_of = (datum.received_us, event_us, datum.event_error_us, datum.tick_ms, datum.device_time_us)
        if times_of != self._times_of or times is not self._times:
            if times is not self._times:
                self._received_clock = self._event_clock = self._estimated_clock = _NO_SPAN
                self._received_us = None
            if event_us is not None and datum.device_time_us is None and self._is_estimated(event_us, times):
                self._from_source_to_lanesequence = self._encode_estimated(datum, event_us, times)
            else:
                self._from_source_to_lanesequence = self._encode_times(datum, times)
            self._times_of, self._times = times_of, times
        sequence = b"%d" % row.sequence
        digits = len(sequence)
        if boot is None or device_sequence is None:
            headers, device, number_bytes, number = self._headers, self._content_type_and_variables, b"", b""
        else:
            if boot != self._device_boot:
                self._from_content_type_to_devicesequence = (
                    self._content_type_and_variables + _header(_DEVICE_BOOT, boot) + _DEVICE_SEQUENCE
                )
                self._device_boot = boot
            device = self._from_content_type_to_devicesequence
            number = b"%d" % device_sequence
            headers, number_bytes = self._headers_numbered, _VARINTS[len(number)]
            if self._counter:
                number += self._counter
                headers += 1
        if datum.doubt in _DOUBTS:
            number += _DOUBTS[datum.doubt]
            headers += 1
        if self._boottime_error:
            number += self._boottime_error
            headers += 1
        if datum.properties is not None:
            count, of_user = _user_headers(datum.properties)
            number += of_user
            headers += count
        record = b"".join(
            (
                # Attributes, and the distance from the batch's timestamp: both 0.
                b"\0\0",
                varint(offset),
                self._encoded_key,
                varint(len(payload)),
                payload,
                _VARINTS[headers],
                self._until_id[digits],
                sequence,
                self._from_source_to_lanesequence,
                _VARINTS[digits],
                sequence,
                device,
                number_bytes,
                number,
            )
        )
        return varint(len(record)) + record

    def _is_estimated(self, event_us: int, times: BootTimes) -> bool:
        """Whether a boot time goes out as an estimated wall time."""
        _, _, _, from_us, until_us = self._estimated_clock
        if from_us <= event_us < until_us:
            return True
        clock = times.around(event_us)
        if not clock.synced or self._of_gateway:
            return False
        self._estimated_clock = clock
        return True

    def _encode_estimated(self, datum: Datum, event_us: int, times: BootTimes) -> bytes:
        """Encode times that follow from a sensor's clock, as `_encode_times` does others. Each row has its own time."""
        offset_us, error_us, _, _, _ = self._estimated_clock
        event_s, rest_us = divmod(event_us + offset_us, 1_000_000)
        if event_s != self._event_s:
            # Clamped as all times are. The fraction of a second does not matter at the limits.
            self._until_event_us = self._from_source_to_time + rfc3339(event_s * 1_000_000)[:-7]
            self._event_s = event_s
        self._quality_of, self._boottime_error = (), b""
        boottime = b"%d" % event_us
        return b"".join(
            (
                self._until_event_us,
                b"%06dZ" % rest_us,
                _estimated((error_us or 0) + datum.event_error_us | ESTIMATED_ROUNDING_US),
                self._encode_received(datum.received_us, times),
                self._from_gatewayboot_to_boottime,
                _VARINTS[len(boottime)],
                boottime,
                self._from_lane_to_lanesequence,
            )
        )

    def _encode_received(self, received_us: int, times: BootTimes) -> bytes:
        if received_us != self._received_us:
            offset_us, _, _, from_us, until_us = self._received_clock
            if not from_us <= received_us < until_us:
                self._received_clock = times.around(received_us)
                offset_us = self._received_clock.offset_us
            self._received, self._received_us = rfc3339(received_us + offset_us), received_us
        return self._received

    def _encode_times(self, datum: Datum, times: BootTimes) -> bytes:
        received_us, event_us = datum.received_us, datum.event_us
        received = event = self._encode_received(received_us, times)
        clock = self._received_clock
        how: tuple[object, ...] = (clock, datum.event_error_us, datum.tick_ms is None, event_us is None)
        if event_us is None:
            event_us = received_us
        else:
            # The event may lie hours before its receipt, when another offset and bound held.
            clock = self._event_clock
            offset_us, _, _, from_us, until_us = clock
            if not from_us <= event_us < until_us:
                clock = self._event_clock = times.around(event_us)
                offset_us = clock.offset_us
            event = rfc3339(event_us + offset_us)
            how = clock, datum.event_error_us, True, False
        device_time_us = None if datum.device_time_us is None else told_us(datum, clock, self._limits)
        if device_time_us is not None:
            event, how = rfc3339(device_time_us), (DEVICE, datum.event_error_us)
        if how != self._quality_of:
            self._quality_of = how
            if device_time_us is None:
                error_us, quality = time_quality(datum, clock, of_gateway=self._of_gateway)
            else:
                error_us, quality = datum.event_error_us, DEVICE
            self._from_timeerror_to_receivedtime = _TIME_ERROR + string(b"%d" % error_us) + _quality(quality)
            # The gateway does not correct a sensor's own time.
            is_final = clock.synced or device_time_us is not None
            self._boottime_error = b"" if is_final else _boottime_error(datum, of_gateway=self._of_gateway)
        boottime = b"%d" % event_us
        return b"".join(
            (
                self._from_source_to_time,
                event,
                self._from_timeerror_to_receivedtime,
                received,
                self._from_gatewayboot_to_boottime,
                _VARINTS[len(boottime)],
                boottime,
                self._from_lane_to_lanesequence,
            )
        )


def time_quality(datum: Datum, clock: WallClock, *, of_gateway: bool) -> tuple[int, str]:
    """The bound of the event time's error in microseconds, and how the time was obtained.

    `clock` has what is known of wall time at the event.
    """
    boottime_error_us = boottime_error(datum, of_gateway=of_gateway)
    is_of_receipt = datum.event_us is None and datum.tick_ms is None
    if clock.error_us is None:
        return TIME_ERROR_UNKNOWN_US, "received" if is_of_receipt and not of_gateway else "bounded"
    error_us = min(clock.error_us + boottime_error_us, TIME_ERROR_UNKNOWN_US)
    if clock.is_bounded:
        return error_us, "bounded"
    if of_gateway:
        return error_us, "synced"
    if datum.event_us is not None:
        return error_us, "estimated"
    return error_us, "received" if is_of_receipt else "bounded"


def boottime_error(datum: Datum, *, of_gateway: bool) -> int:
    """The bound of the error of `ce_boottime`, in microseconds of the gateway's own clock."""
    if datum.event_us is None and datum.tick_ms is not None and not of_gateway:
        # A sensor with a ring, whose clock was not learnt. Its reading may be older than its receipt by any time.
        return TIME_ERROR_UNKNOWN_US
    # A time of receipt has a bound too, if the reading was taken in again in another boot.
    return datum.event_error_us


def _boottime_error(datum: Datum, *, of_gateway: bool) -> bytes:
    return _header(_BOOT_TIME_ERROR, str(boottime_error(datum, of_gateway=of_gateway)))


# A span that holds no time.
_NO_SPAN = WallClock(0, None, from_us=FOREVER_US, until_us=-FOREVER_US)

DOUBTS = {Doubt.REDELIVERED.value: REDELIVERED, Doubt.CONFLICT.value: CONFLICT}
_DOUBTS = {number: _header(_DOUBT, word) for number, word in DOUBTS.items()}
