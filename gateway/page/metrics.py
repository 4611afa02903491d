"""Writes `/metrics` in Prometheus's text format. Labels are few, and each has few values."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.command import Outcome
from gateway.health.facts import Facts

REASONS_MAX = 50
"""Values of one label. Reasons are names of this program's, and there are fewer."""


class DeviceFigures(NamedTuple):
    """One device whose last hour is kept."""

    device: str
    readings: int
    """Readings of its present boot."""
    heard_us: int
    missing: int


class _Seen(Collector):
    """Metric families of one moment."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def text(
    facts: Facts, versions: Mapping[str, str], listener: Mapping[str, int], devices: Sequence[DeviceFigures]
) -> bytes:
    """Return all metrics. `listener` counts what the MQTT listener refused or ended, by reason."""
    registry = CollectorRegistry()
    gateway = [*_gateway(facts, versions), *_by_reason(facts, listener), *_commands(facts)]
    registry.register(_Seen([*gateway, *_devices(facts, devices)]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _gateway(facts: Facts, versions: Mapping[str, str]) -> Iterator[Metric]:
    uplink, buffer = facts.uplink, facts.settings.buffer
    yield InfoMetricFamily(
        "sluice_build", "What runs here.", {name: versions[name] for name in ("sluice", "python", "sqlite")}
    )
    yield CounterMetricFamily("sluice_readings", "Readings taken in.", facts.counts.get("readings", 0))
    yield CounterMetricFamily("sluice_uplink_sent_records", "Readings and events that Kafka has taken.", uplink.sent)
    yield CounterMetricFamily("sluice_uplink_wire_bytes", "Bytes on the wire to and from Kafka.", uplink.wire_bytes)
    yield GaugeMetricFamily("sluice_uplink_up", "Whether Kafka is reached.", uplink.up)
    yield GaugeMetricFamily(
        "sluice_uplink_link_bytes_per_second", "What the link was seen to carry.", uplink.bytes_per_s
    )
    yield GaugeMetricFamily("sluice_uplink_quota_used_up", "Whether the day's quota is.", uplink.quota_used_up)
    yield GaugeMetricFamily("sluice_buffer_rows", "Readings and events that wait for Kafka.", facts.rows)
    yield CounterMetricFamily(
        "sluice_buffer_spared_rows",
        "Readings and events that Kafka had before the disk, which never got them.",
        facts.counts.get("spared", 0),
    )
    yield GaugeMetricFamily("sluice_buffer_bytes", "What the buffer takes.", facts.bytes_used)
    yield GaugeMetricFamily("sluice_buffer_max_bytes", "What it may take (buffer.bytes_max).", buffer.bytes_max)
    yield GaugeMetricFamily("sluice_buffer_full", "Whether it is full.", facts.full)
    yield GaugeMetricFamily(
        "sluice_buffer_devices_above_share",
        "Devices that were kept to their share in the last minute (buffer.fair_from).",
        facts.above_share_devices,
    )
    yield CounterMetricFamily(
        "sluice_buffer_share_refused_readings",
        "Readings that were refused for that, each time they came.",
        facts.counts.get("share-refused", 0),
    )
    above = GaugeMetricFamily("sluice_buffer_above_share_bytes", "What some of these hold.", labels=["device"])
    for each in facts.above_share:
        above.add_metric([each.device], each.bytes)
    yield above
    yield GaugeMetricFamily("sluice_buffer_failing", "Whether its disk fails.", facts.failing is not None)
    if facts.room_bytes is not None:
        yield GaugeMetricFamily("sluice_buffer_room_bytes", "What may still come in.", facts.room_bytes)
    if facts.hours_until_full is not None:
        yield GaugeMetricFamily(
            "sluice_buffer_full_in_seconds",
            "When it is full if nothing goes to Kafka, at the last day's rate.",
            facts.hours_until_full * 3_600,
        )
    if facts.disk_free_bytes is not None:
        yield GaugeMetricFamily("sluice_disk_free_bytes", "Free on the buffer's file system.", facts.disk_free_bytes)
    if facts.disk_bytes_per_day is not None:
        yield GaugeMetricFamily(
            "sluice_disk_written_bytes_per_day", "Written by the gateway.", facts.disk_bytes_per_day
        )
    yield GaugeMetricFamily("sluice_clock_synced", "Whether this box's clock is.", facts.clock.synced)
    if facts.clock.error_us is not None:
        yield GaugeMetricFamily(
            "sluice_clock_error_bound_seconds", "The bound of its error.", facts.clock.error_us / 1e6
        )
    yield GaugeMetricFamily("sluice_devices", "Devices that are known.", facts.devices)
    yield GaugeMetricFamily("sluice_devices_silent", "Of those, silent beyond their habit.", len(facts.silent))
    yield CounterMetricFamily(
        "sluice_lost_readings", "Readings that are gone for good, since the start or not yet reported.", facts.lost
    )
    yield GaugeMetricFamily("sluice_start_time_seconds", "When the gateway was started.", time.time() - facts.up_s)


def _by_reason(facts: Facts, listener: Mapping[str, int]) -> Iterator[Metric]:
    if facts.buffer_status is not None:
        kept = GaugeMetricFamily("sluice_quarantined", "Messages kept in the quarantine.", labels=["reason"])
        for reason, count in list(facts.buffer_status.quarantine_reasons.items())[:REASONS_MAX]:
            kept.add_metric([reason], count)
        yield kept
    ended = CounterMetricFamily("sluice_listener_events", "What the MQTT listener saw.", labels=["reason"])
    for reason, count in list(listener.items())[:REASONS_MAX]:
        ended.add_metric([reason], count)
    yield ended


def _commands(facts: Facts) -> Iterator[Metric]:
    """Yield figures of the commands from the cloud, if the gateway reads any."""
    if not facts.commands:
        return
    yield GaugeMetricFamily("sluice_commands_open", "Commands that have not ended.", facts.commands["waiting"])
    ended = CounterMetricFamily("sluice_commands_ended", "Commands that have ended.", labels=["outcome"])
    # Also those that were not seen yet: Prometheus sees no increase where a series begins.
    for outcome in get_args(Outcome):
        ended.add_metric([outcome], facts.commands["counts"].get(outcome, 0))
    yield ended


def _devices(facts: Facts, devices: Sequence[DeviceFigures]) -> Iterator[Metric]:
    """Yield figures of as many devices as `status_page.history_devices_max` allows."""
    readings = CounterMetricFamily("sluice_device_readings", "Readings of its present boot.", labels=["device"])
    silence = GaugeMetricFamily("sluice_device_silence_seconds", "Since its last reading.", labels=["device"])
    missing = GaugeMetricFamily(
        "sluice_device_missing_readings", "By its sequences, of its present boot, at the least.", labels=["device"]
    )
    for each in devices:
        readings.add_metric([each.device], each.readings)
        silence.add_metric([each.device], max(0.0, (facts.boottime_us - each.heard_us) / 1e6))
        missing.add_metric([each.device], each.missing)
    yield from (readings, silence, missing)
