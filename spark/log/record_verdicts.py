"""Judges records for `log` by the rule book, and by retention and deletions. Executors import this module."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from gateway.record_contract import GATEWAY_TYPES, READING_TYPE, TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import Streams, Times
from spark.decode.record_rules import FIELDS, Reader, Record
from spark.decode.record_times import DAY_US, microseconds
from spark.decode.topic_speakers import Speakers, TopicOwners
from spark.log.verdicts import DELETED, EMPTIED, EXPIRED, IMPLAUSIBLE_DAY

Deletions = dict[tuple[str, str], int]
"""Time of the last deletion, in microseconds since 1970, by namespace and device."""
_EMPTIED = [name for column in EMPTIED if (name := FIELDS.get(column, column)) in Record.__dataclass_fields__]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """All that decides on records beside the records themselves."""

    streams: Streams
    owners: TopicOwners
    deletions: Deletions

    def judge(self) -> "Judge":
        return Judge(self)


class Judge:
    """Judges typed records."""

    def __init__(self, verdicts: Verdicts) -> None:
        streams = verdicts.streams
        self._speakers = Speakers(verdicts.owners)
        self._reader = Reader(streams)
        self._days = EventDays(streams.times)
        self._log_days = streams.retention.log_days
        self._deletions = verdicts.deletions
        self._by_key = {"/".join(name): deleted_us for name, deleted_us in verdicts.deletions.items()}

    def judge(self, record: Record) -> None:
        """Read a typed record's value. Registry, declarations, retention and deletions decide on rejects."""
        self._speakers.judge(record)
        self._reader.read(record)
        if self._log_days is not None and self._is_expired(record, self._log_days):
            record.metrics, record.reject_reason = None, EXPIRED
        if self._deletions and self._is_deleted(record):
            for name in _EMPTIED:
                setattr(record, name, None)
            record.reject_reason = DELETED

    def _is_expired(self, record: Record, log_days: int) -> bool:
        """True for a reading measured longer before Kafka took it in than `log` keeps records.

        The decision depends on the record alone, so that a replay decides the same. A reading with an implausible date
        is kept. It is in no window.
        """
        if record.ce_type != READING_TYPE or record.reject_reason is not None:
            return False
        measured = self._days.day_of(record.event_us, record.time_error_us, record.kafka_us)
        return IMPLAUSIBLE_DAY < measured < record.kafka_us // DAY_US - log_days

    def _is_deleted(self, record: Record) -> bool:
        """True for a record of deleted data.

        A record stays if it was certainly taken after the deletion: the device may go on, or another may get its name.
        """
        if record.device is None or (record.ce_type or "").startswith(GATEWAY_TYPES):
            return False
        # If the headers cannot be read, only the record's key is known.
        of_key = self._by_key.get(record.device)
        at_us = of_key if record.namespace is None else self._deletions.get((record.namespace, record.device))
        if at_us is None:
            return False
        if record.event_us is None or record.time_error_us is None:
            return True
        return record.kafka_us < at_us or record.event_us - record.time_error_us < at_us


class EventDays:
    """Finds the dates of event times."""

    def __init__(self, times: Times) -> None:
        self._from_us = microseconds(times.plausible_from_time)
        self._ahead_us = times.ahead_max_s * 1_000_000

    def day_of(self, event_us: int | None, error_us: int | None, kafka_us: int) -> int:
        """Days since 1970 of an event time; IMPLAUSIBLE_DAY if it is implausible or unknown."""
        if event_us is None or error_us is None:
            return IMPLAUSIBLE_DAY
        return event_us // DAY_US if self.is_plausible(event_us, error_us, kafka_us) else IMPLAUSIBLE_DAY

    def is_plausible(self, event_us: Any, error_us: Any, kafka_us: Any) -> Any:
        """True for event times that are plausible and known, of numbers or of arrays of them."""
        # The upper bound is by Kafka's clock: a retry must get the same date, and the time of its run differs.
        is_in_time = (event_us >= self._from_us) & (event_us <= kafka_us + self._ahead_us)
        return is_in_time & (error_us < TIME_ERROR_UNKNOWN_US)


def date_text(day: int) -> str:
    """A day since 1970 as a table's partition names it."""
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()
