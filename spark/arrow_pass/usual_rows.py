"""Reads the usual record by columns: a fast way to what the rule book says. Executors import this module.

A usual record is a reading with all of its headers, then user properties or nothing, and a flat JSON object of plain
numbers that are all in range. Every other record is left to the rule book, so that each doubt here costs time alone. No
reject and no event of a gateway is usual.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.record_contract import DEVICE_HEADERS, HEADERS, READING_TYPE, TIME_ERROR_UNKNOWN_US, USER_PREFIX
from spark.arrow_pass.decimal_columns import Numbers, decimals_of_64_bits
from spark.arrow_pass.groups import Mask, Rows, integers_of, mask_of
from spark.decode.codec_declarations import DECIMALS_MAX, IDENTITY_MEMBERS, Metric, name_order
from spark.decode.codec_plain import PayloadReader
from spark.decode.event_bodies import TEXT_BYTES_MAX
from spark.decode.record_columns import METRICS, TIME, VALUE, type_of
from spark.decode.record_rules import BUFFER_CHARS, OTHER_HEADER_BYTES_MAX, OTHER_HEADERS_MAX
from spark.decode.record_times import DAY_US
from spark.decode.topic_speakers import Speakers
from spark.log.edge_times import TOLD_SLACK_US, Clocks, Correction
from spark.log.record_verdicts import EventDays, Verdicts

ROWS_MIN = 100
"""Records of a topic from which columns are quicker. Fewer are left to the rule book."""
PAYLOAD_BYTES_MAX = 1_024
NAMES_MAX = 64
"""Metrics of a usual payload."""
_NAME = "[A-Za-z0-9_.-]+"
_S = r"[ \t\r\n]*"
# With at most eleven digits before the point, the number fits however it is rounded.
_NUMBER = r"-?(?:0|[1-9][0-9]{0,10})(?:\.[0-9]{1,20})?"
# Without a colon, so that there is one for each member.
_TEXT = r'"[ !#-9;-\[\]-~]*"'
_MEMBER = f'{_S}"{_NAME}"{_S}:{_S}(?:{_NUMBER}|{_TEXT}|true|false|null){_S}'
_PAYLOAD = rf"^\{{{_MEMBER}(?:,{_MEMBER})*\}}{_S}$"
_IDENTITY = "^[0-9a-f]{16}-[0-9a-f]{12}-(?:0|[1-9][0-9]{0,14})$"
_INTEGER = "^(?:0|-?[1-9][0-9]{0,17})$"
_TIME = (
    r"^[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
    r"T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{6}Z$"
)
_READ = pa.decimal128(34, 20)
_CLOCK_SLACK_US = 1_000_000
"""Microseconds by which a corrected time may be wrong here, where it is reckoned in binary fractions."""


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual readings of one stream."""

    rows: Rows
    columns: dict[str, pa.Array]
    """The columns of `READ_COLUMNS`."""
    event_us: Numbers
    kafka_us: Numbers
    names: tuple[str, ...]
    """Metrics, in their order."""
    values: Numbers
    """Value of each reading's metrics, in millionths. One row for each reading, one column for each metric."""
    there: Mask
    """Which of these values there are."""


class UsualReader:
    """Finds usual readings among records of Spark's Kafka source, and reads them."""

    def __init__(self, verdicts: Verdicts, clocks: Clocks) -> None:
        self._payloads = PayloadReader(verdicts.streams)
        self._days = EventDays(verdicts.streams.times)
        self._log_days = verdicts.streams.retention.log_days
        self._speakers = Speakers(verdicts.owners)
        self._deleted = sorted({device for _, device in verdicts.deletions})
        self._corrected: dict[str, list[tuple[Correction, int | None]]] = {}
        for (*_, boot), told in clocks.corrections.items():
            self._corrected.setdefault(boot, []).append(told)

    def read(self, table: pa.Table) -> list[Usual]:
        """Return the usual readings of a table whose columns have one chunk each."""
        found: list[Usual] = []
        topics, headers = table["topic"].chunk(0), _Headers(table["headers"].chunk(0))
        for topic in pc.unique(topics).to_pylist():
            rows = np.flatnonzero(pc.equal(topics, topic).to_numpy(zero_copy_only=False))
            if len(rows) < ROWS_MIN:
                continue
            try:
                usual = self._of_topic(table, headers, topic, rows)
            except pa.ArrowInvalid:
                # Bytes that are no text, or a date that no month has. This is rare, and the rule book tells it.
                continue
            if usual is not None:
                found.append(usual)
        return found

    def _of_topic(self, table: pa.Table, headers: "_Headers", topic: str, rows: Rows) -> Usual | None:
        rows = rows[headers.fit(rows)]
        if not len(rows):
            return None
        texts = headers.texts(rows)
        key, value = (table[name].chunk(0).take(pa.array(rows)) for name in ("key", "value"))
        is_usual = _usual_headers(texts) & _fits(value, _PAYLOAD)
        is_usual &= _are_short(key) & _are_short(value, PAYLOAD_BYTES_MAX)
        is_usual &= self._is_json(topic, texts["content-type"])
        if not is_usual.any():
            return None
        kept = pa.array(np.flatnonzero(is_usual))
        rows, texts = rows[is_usual], {name: text.take(kept) for name, text in texts.items()}
        key, value = key.take(kept).cast(pa.string()), value.take(kept)
        kafka = table["timestamp"].chunk(0).take(pa.array(rows))
        return self._read(topic, rows, texts, key, value, kafka, headers, table)

    def _read(  # noqa: PLR0913, PLR0917 - the parts of a record
        self,
        topic: str,
        rows: Rows,
        texts: dict[str, pa.Array],
        key: pa.Array,
        value: pa.Array,
        kafka: pa.Array,
        headers: "_Headers",
        table: pa.Table,
    ) -> Usual | None:
        stream = self._payloads.declaration(topic)
        metrics = () if stream is None else stream.metrics
        payloads = _Payloads(value.cast(pa.string()), metrics)
        event, received = (texts[name].cast(TIME) for name in ("ce_time", "ce_receivedtime"))
        numbers = {name: texts[name].cast(pa.int64()) for name in _INTEGERS}
        source, namespace, gateway, speaks = self._sources(topic, texts["ce_source"])
        device = _devices(source, namespace, key)
        event_us, kafka_us = integers_of(event), integers_of(kafka)
        is_usual = payloads.is_usual & speaks & self._is_new(event_us, kafka_us, integers_of(numbers["ce_timeerror"]))
        if self._deleted:
            is_usual &= ~mask_of(pc.is_in(device, pa.array(self._deleted)))
        is_usual &= ~self._may_move(namespace, gateway, texts["ce_gatewayboot"], integers_of(numbers["ce_boottime"]))
        if not is_usual.any():
            return None
        count = len(rows)
        ours: dict[str, pa.Array] = {
            "topic": pa.repeat(pa.scalar(topic), count),
            "partition": table["partition"].chunk(0).take(pa.array(rows)),
            "offset": table["offset"].chunk(0).take(pa.array(rows)),
            "kafka_timestamp": kafka,
            "key": key,
            "value": value,
            "namespace": namespace,
            "gateway": gateway,
            "device": device,
            "stream": pa.repeat(pa.scalar(topic), count),
            "buffer": pc.utf8_slice_codeunits(texts["ce_id"], 0, BUFFER_CHARS),
            "lane": texts["ce_lane"],
            "lane_sequence": numbers["ce_lanesequence"],
            "ce_id": texts["ce_id"],
            "ce_type": texts["ce_type"],
            "subject": texts["ce_subject"],
            "event_time": event,
            "time_error_us": numbers["ce_timeerror"],
            "time_quality": texts["ce_timequality"],
            "received_time": received,
            "gateway_boot": texts["ce_gatewayboot"],
            "boot_time_us": numbers["ce_boottime"],
            "content_type": texts["content-type"],
            "device_boot": texts["ce_deviceboot"],
            "device_sequence": numbers["ce_devicesequence"],
        }
        places = np.flatnonzero(is_usual)
        kept = pa.array(places)
        columns = {name: column.take(kept) for name, column in ours.items()}
        columns["headers"] = headers.of_users(rows[places])
        values, there = payloads.values[places], payloads.there[places]
        columns["metrics"] = _metrics(payloads.names, values, there)
        for name in ("device_counter", "doubt", "boot_time_error_us", "undeclared", "reject_reason"):
            columns[name] = pa.nulls(len(places), type_of(name))
        return Usual(rows[places], columns, event_us[places], kafka_us[places], payloads.names, values, there)

    def _is_json(self, topic: str, content_types: pa.Array) -> Mask:
        """True for records whose payload is read as JSON, with metrics at its top."""
        stream = self._payloads.declaration(topic)
        if stream is not None:
            is_flat = all(len(metric.path) == 1 for metric in stream.metrics)
            return np.full(len(content_types), stream.codec == "json" and is_flat and len(stream.metrics) <= NAMES_MAX)
        encoded = pc.fill_null(content_types, "").dictionary_encode()
        of_type = [self._payloads.codec_of(topic, each, b"{}") == "json" for each in encoded.dictionary.to_pylist()]
        is_json: Mask = np.array(of_type, dtype=np.bool_)[encoded.indices.to_numpy()]
        return is_json

    def _sources(self, topic: str, sources: pa.Array) -> tuple[Numbers, pa.Array, pa.Array, Mask]:
        """Numbers of the sources, namespaces, gateways, and which of the sources are right and may speak here."""
        encoded = sources.dictionary_encode()
        each = [source.split("/") for source in encoded.dictionary.to_pylist()]
        parts = [tuple(part[1:]) if len(part) == 3 and not part[0] and all(part[1:]) else None for part in each]
        may = [part is not None and self._speakers.may_speak(f"/{part[0]}/{part[1]}", topic) for part in parts]
        places = encoded.indices
        names = (pa.array([part and part[place] for part in parts], pa.string()) for place in (0, 1))
        namespace, gateway = (name.take(places) for name in names)
        numbers = places.to_numpy().astype(np.int64)
        return numbers, namespace, gateway, np.array(may, dtype=np.bool_)[numbers]

    def _is_new(self, event_us: Numbers, kafka_us: Numbers, error_us: Numbers) -> Mask:
        """True for readings that are not older than `log` keeps them."""
        if self._log_days is None:
            return np.full(len(event_us), fill_value=True)
        is_dated: Mask = self._days.is_plausible(event_us, error_us, kafka_us)
        return ~is_dated | (event_us // DAY_US >= kafka_us // DAY_US - self._log_days)

    def _may_move(self, namespace: pa.Array, gateway: pa.Array, boots: pa.Array, boot_us: Numbers) -> Mask:
        """True for readings that a time correction may move."""
        moved = np.zeros(len(boot_us), dtype=np.bool_)
        # There may be many corrections. Few are of a boot that is heard now.
        for boot in self._corrected.keys() & pc.unique(boots).to_pylist():
            for last, wrong_until_us in self._corrected[boot]:
                told = pc.and_(pc.equal(namespace, last.namespace), pc.equal(gateway, last.gateway))
                away = boot_us.astype(np.float64) - last.boottime_us
                reckoned_us = boot_us.astype(np.float64) + last.offset_us + away * float(last.rate_ppm) / 1e6
                until_us = max(last.told_us, last.told_us if wrong_until_us is None else wrong_until_us)
                is_before = reckoned_us <= until_us + TOLD_SLACK_US + _CLOCK_SLACK_US
                moved |= mask_of(pc.and_(told, pc.equal(boots, boot))) & is_before
        return moved


_INTEGERS = ("ce_lanesequence", "ce_timeerror", "ce_boottime", "ce_devicesequence")


class _Headers:
    """The headers of all records, which stand one behind the other."""

    def __init__(self, column: pa.ListArray) -> None:
        self._starts = column.offsets.to_numpy()[:-1].astype(np.int64)
        counts = np.diff(column.offsets.to_numpy()).astype(np.int64)
        self._names, self._contents = column.values.field(0), column.values.field(1)
        # User properties stand behind the others. Most records have none.
        is_ours = np.flatnonzero(counts > len(HEADERS))
        names = self._names.take(pa.array(self._starts[is_ours] + len(HEADERS)))
        ours = np.minimum(counts, len(HEADERS) + len(DEVICE_HEADERS))
        ours[is_ours[mask_of(pc.starts_with(names, USER_PREFIX))]] = len(HEADERS)
        self._counts, self._users = ours, counts - ours

    def fit(self, rows: Rows) -> Mask:
        """True for records with all headers of a usual record, in their order, and no others but user properties."""
        counts = self._counts[rows]
        fits: Mask = (counts == len(HEADERS)) | (counts == len(HEADERS) + len(DEVICE_HEADERS))
        fits &= self._users[rows] <= OTHER_HEADERS_MAX
        with_users = np.flatnonzero(fits & (self._users[rows] > 0))
        if len(with_users):
            places, of = self._places_of_users(rows[with_users])
            names, contents = self._names.take(places), self._contents.take(places)
            is_good = mask_of(pc.starts_with(names, USER_PREFIX)) & _are_short(names, OTHER_HEADER_BYTES_MAX)
            is_good &= _are_short(contents, OTHER_HEADER_BYTES_MAX)
            fits[with_users[of[~is_good]]] = False
        for place, name in enumerate((*HEADERS, *DEVICE_HEADERS)):
            there = np.flatnonzero(fits & (counts > place))
            names = self._names.take(pa.array(self._starts[rows[there]] + place))
            fits[there[~mask_of(pc.equal(names, name))]] = False
        return fits

    def of_users(self, rows: Rows) -> pa.Array:
        """The headers of user properties of these records; null for a record without any."""
        counts = self._users[rows]
        if not counts.any():
            return pa.nulls(len(rows), type_of("headers"))
        places, _ = self._places_of_users(rows)
        ends = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=ends[1:])
        kind = type_of("headers")
        each = [self._names.take(places).cast(pa.string()), self._contents.take(places).cast(pa.binary())]
        structs = pa.StructArray.from_arrays(each, fields=list(kind.value_type))
        return pa.ListArray.from_arrays(pa.array(ends), structs, type=kind, mask=pa.array(counts == 0))

    def _places_of_users(self, rows: Rows) -> tuple[pa.Array, Numbers]:
        """The places of the headers of user properties, and for each of them the position of its record in `rows`."""
        counts = self._users[rows]
        of = np.repeat(np.arange(len(rows)), counts)
        firsts = np.cumsum(counts) - counts
        starts = self._starts[rows] + self._counts[rows]
        return pa.array(starts[of] + np.arange(len(of)) - firsts[of]), of

    def texts(self, rows: Rows) -> dict[str, pa.Array]:
        """The values of the headers of these records, by name. Raises ArrowInvalid if one is no text."""
        texts = {}
        for place, name in enumerate((*HEADERS, *DEVICE_HEADERS)):
            is_there = self._counts[rows] > place
            places = pa.array(np.where(is_there, self._starts[rows] + place, 0), mask=~is_there)
            texts[name] = self._contents.take(places).cast(pa.string())
        return texts


def _usual_headers(texts: dict[str, pa.Array]) -> Mask:
    """True for records whose headers are right and usual."""
    lacks_device = mask_of(pc.and_(pc.is_null(texts["ce_deviceboot"]), pc.is_null(texts["ce_devicesequence"])))
    usual = lacks_device | (_are_short(texts["ce_deviceboot"]) & _fits(texts["ce_devicesequence"], _INTEGER))
    for name in HEADERS:
        usual &= _are_short(texts[name])
    identity = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(texts["ce_id"], 0, BUFFER_CHARS), texts["ce_lane"], texts["ce_lanesequence"], "-"
    )
    usual &= mask_of(pc.equal(texts["ce_specversion"], "1.0")) & mask_of(pc.equal(texts["ce_type"], READING_TYPE))
    usual &= _fits(texts["ce_id"], _IDENTITY) & mask_of(pc.equal(identity, texts["ce_id"]))
    usual &= _fits(texts["ce_time"], _TIME) & _fits(texts["ce_receivedtime"], _TIME)
    error = texts["ce_timeerror"]
    is_count = _fits(error, _INTEGER) & ~mask_of(pc.starts_with(error, "-"))
    usual &= is_count | mask_of(pc.equal(error, str(TIME_ERROR_UNKNOWN_US)))
    usual &= _fits(texts["ce_boottime"], _INTEGER)
    return usual


class _Payloads:
    """The numbers of flat JSON objects."""

    def __init__(self, texts: pa.Array, metrics: tuple[Metric, ...]) -> None:
        declared = metrics or tuple(Metric(name, (name,)) for name in _names_in(texts[0].as_py()))
        in_order = sorted(declared, key=lambda metric: name_order(metric.name))
        self.names = tuple(metric.name for metric in in_order)
        self.values = np.zeros((len(texts), len(in_order)), dtype=np.int64)
        self.there = np.zeros((len(texts), len(in_order)), dtype=np.bool_)
        self.is_usual = np.full(len(texts), fill_value=True)
        for place, metric in enumerate(in_order):
            self._read(texts, place, metric)
        # Each member has one colon. If there are as many as known members, all members are known, and each comes once.
        colons = pc.count_substring(texts, ":").to_numpy()
        present = self.there.sum(axis=1)
        others = np.flatnonzero(colons != present)
        if len(others):
            identity = set(IDENTITY_MEMBERS) - {metric.path[0] for metric in in_order}
            left = texts.take(pa.array(others))
            counts = [_count(left, name) for name in sorted(identity)]
            are_once = np.all([count <= 1 for count in counts], axis=0)
            self.is_usual[others] &= are_once & (colons[others] == present[others] + np.sum(counts, axis=0))
        self.is_usual &= present > 0

    def _read(self, texts: pa.Array, place: int, metric: Metric) -> None:
        """Read a metric. Its number is rounded for its scale, so that scaling rounds nothing."""
        if re.fullmatch(_NAME, metric.path[0]) is None:
            # No usual payload has such a name.
            return
        found = pc.extract_regex(texts, rf"{_member(metric.path[0])}(?P<number>{_NUMBER})").field(0)
        # Outside of structs that are null, Arrow has empty texts.
        found = pc.if_else(pc.equal(found, ""), pa.scalar(None, pa.string()), found)
        rounded = pc.round(
            found.cast(_READ), ndigits=metric.decimals - metric.shift, round_mode="half_towards_infinity"
        ).cast(pa.decimal128(24, DECIMALS_MAX - metric.shift))
        there, values = mask_of(pc.is_valid(rounded)), _low_half(rounded)
        self.there[:, place], self.values[:, place] = there, np.where(there, values, 0)
        for bound, is_beyond in ((metric.min, np.less), (metric.max, np.greater)):
            if bound is not None:
                limit = int(bound.scaleb(DECIMALS_MAX))
                self.is_usual &= ~(there & is_beyond(self.values[:, place], limit))


def _names_in(payload: str) -> list[str]:
    """Names of the metrics in a usual payload of which nothing is declared."""
    numbers = [name for name, value in json.loads(payload).items() if type(value) in {int, float}]
    return [name for name in numbers if name not in IDENTITY_MEMBERS][:NAMES_MAX]


def _member(name: str) -> str:
    """Pattern of a member's name up to its value. No text of a usual payload has a colon behind it."""
    return f'"{name.replace(".", "[.]")}"{_S}:{_S}'


def _count(texts: pa.Array, name: str) -> Numbers:
    counts: Numbers = pc.count_substring_regex(texts, _member(name)).to_numpy().astype(np.int64)
    return counts


def _devices(sources: Numbers, namespaces: pa.Array, keys: pa.Array) -> pa.Array:
    """The keys, without the namespace if it stands before them."""
    if not pc.any(pc.match_substring(keys, "/")).as_py():
        return keys
    encoded = keys.dictionary_encode()
    pairs = sources * len(encoded.dictionary) + encoded.indices.to_numpy()
    _, firsts, places = np.unique(pairs, return_index=True, return_inverse=True)
    chosen = pa.array(firsts)
    each = zip(keys.take(chosen).to_pylist(), namespaces.take(chosen).to_pylist(), strict=True)
    return pa.array([key.removeprefix(f"{namespace}/") for key, namespace in each]).take(pa.array(places))


def _metrics(names: tuple[str, ...], values: Numbers, there: Mask) -> pa.Array:
    """The column of metrics."""
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(there.sum(axis=1), out=ends[1:])
    places = np.broadcast_to(np.arange(len(names)), there.shape)[there]
    each = [
        pa.array(names, pa.string()).take(pa.array(places)),
        decimals_of_64_bits(values[there], VALUE),
        pa.nulls(len(places), pa.int64()),
    ]
    structs = pa.StructArray.from_arrays(each, fields=list(METRICS.value_type))
    return pa.ListArray.from_arrays(pa.array(ends), structs)


def _low_half(column: pa.Array) -> Numbers:
    """The lower 64 bits of decimals that fit into them, counted in the last decimal."""
    halves = np.frombuffer(column.buffers()[1], dtype=np.int64)
    low: Numbers = halves[2 * column.offset : 2 * (column.offset + len(column)) : 2]
    return low


def _are_short(texts: pa.Array, most: int = TEXT_BYTES_MAX) -> Mask:
    """True for texts of at most so many bytes. Null is none."""
    return mask_of(pc.less_equal(pc.binary_length(texts), most))


def _fits(texts: pa.Array, pattern: str) -> Mask:
    return mask_of(pc.match_substring_regex(texts, pattern))
