"""Figures of the running ingest job, for Prometheus and for `/health`."""

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

from gateway.condition_codes import CODES
from spark.finality.gateway_troubles import IN_TROUBLE, UNHEARD, WELL, GatewayNow
from spark.ingest_job import BatchReport, Begun, Listener
from spark.source.open_transactions import OpenTransaction

STUCK_S: Final = 1_800.0
"""Seconds without progress after which the job counts as stuck. A batch takes seconds, and upkeep some minutes."""
TOPICS_MAX: Final = 200
"""Topics with figures of their own. Each has two, and whoever may create topics could fill Prometheus."""
OTHERS: Final = "(others)"
"""Label of the topics beyond TOPICS_MAX, together, which Kafka allows no topic. Label of codes that are not known."""
GATEWAYS_MAX: Final = 1_000
"""Gateways with figures of their own, those in trouble first. All of them are counted by level."""
GATEWAY_LABELS: Final = ("namespace", "gateway", "site")
_KNOWN: Final = {UNHEARD, *CODES}
"""Codes that are labels. A gateway of another make could fill Prometheus with codes of its own."""
BATCH_BUCKETS_S: Final = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, STUCK_S)

_COUNTERS: Final = {
    "rows": ("records", "Records of Kafka that batches have read."),
    "duplicates": ("duplicates", "Records that were seen before."),
    "rejected": ("rejects", "Records that became no reading."),
    "late": ("late_values", "Values that came more than a minute after the end of their windows."),
    "unwindowed": ("unwindowed_readings", "Readings in no window: their time is unknown or cannot be."),
    "deleted": ("deleted_records", "Records of devices whose data was deleted."),
    "corrections": ("corrections", "Corrections of earlier times."),
}
"""Name and meaning of each count of a batch. They begin at 0 with each start of the job."""


class JobFigures:
    """The figures of one run. The job's threads write them, and the page's threads read them."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` gives the time by which the job's progress is judged."""
        self._now_s = now_s
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._counters = {
            count: Counter(f"sluice_ingest_{name}", words, registry=registry)
            for count, (name, words) in _COUNTERS.items()
        }
        self._warnings = Counter("sluice_ingest_warnings", "Warnings, which the log has.", registry=registry)
        self._seconds = Histogram(
            "sluice_ingest_batch_seconds",
            "How long batches took that had records.",
            buckets=BATCH_BUCKETS_S,
            registry=registry,
        )
        self._ready = self._gauge("ready", "Whether the job reads Kafka: 0 until it has started.")
        self._progress = self._gauge("progress_timestamp_seconds", "When a batch ended, or Kafka had no records.")
        self._progress.set_to_current_time()
        self._commit = self._gauge("commit_timestamp_seconds", "When the last batch with records ended. NaN: none yet.")
        # A 0 would say that it was in 1970.
        self._commit.set(math.nan)
        self._lag = self._gauge("lag_records", "Records that the last batch left in Kafka.", "topic")
        self._newest = self._gauge(
            "newest_record_timestamp_seconds", "When Kafka took in the newest record that was read.", "topic"
        )
        self._left_out = self._gauge("left_out_topics", "Topics that gateways write to and that are not read.")
        self._held_back = self._gauge("held_back_records", "Records behind long-open transactions.")
        self._gateways: Sequence[GatewayNow] = ()
        registry.register(_Gateways(lambda: self._gateways))
        # A scrape sees a batch's figures whole.
        self._writing = Lock()
        self._labels: set[str] = set()
        self._is_ready = False
        self._last: BatchReport | None = None
        self._progress_s = now_s()
        self._commit_s: float | None = None

    def text(self) -> bytes:
        """Return all figures in Prometheus's text format."""
        with self._writing:
            return generate_latest(self._registry)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Tell whether the job comes on, with the members of `/health`."""
        now_s, last = self._now_s(), self._last
        still_s = now_s - self._progress_s
        members: dict[str, Any] = {
            "status": "ok" if self._is_ready else "starting",
            "batch": None if last is None else last.batch,
            "lag_records": None if last is None else last.lag,
            "progress_age_s": round(still_s, 1),
            "commit_age_s": None if self._commit_s is None else round(now_s - self._commit_s, 1),
        }
        # A start may replay a whole warehouse first.
        if still_s <= STUCK_S or not self._is_ready:
            return True, members
        reason = f"no batch has ended for {still_s:,.0f} s, and the job does not wait for records either"
        return False, {**members, "status": "stuck", "reason": reason, "code": "ingest-stuck"}

    def beside(self, told: Listener) -> Listener:
        """Return a listener that keeps these figures, and then calls `told`."""

        def ready(begun: Begun) -> None:
            self._is_ready = True
            self._ready.set(1)
            self._gateways = begun.gateways
            self._step()
            told.ready(begun)

        def report(batch: BatchReport) -> None:
            with self._writing:
                self._take(batch)
            told.report(batch)

        def idle() -> None:
            self._step()
            told.idle()

        def leave_out(topics: Mapping[str, str]) -> None:
            self._left_out.set(len(topics))
            told.leave_out(topics)

        def hold_back(transactions: Sequence[OpenTransaction]) -> None:
            self._held_back.set(sum(found.records for found in transactions))
            told.hold_back(transactions)

        def warn(words: str) -> None:
            self._warnings.inc()
            told.warn(words)

        return Listener(ready, report, idle, leave_out, hold_back, warn)

    def _take(self, batch: BatchReport) -> None:
        counts = batch.counts
        for count, counter in self._counters.items():
            counter.inc(getattr(counts, count))
        self._seconds.observe(counts.seconds)
        for topic, newest_us in counts.newest_us.items():
            self._newest.labels(self._label(topic)).set(newest_us / 1e6)
        if batch.lags is not None:
            lags: dict[str, int] = {}
            for topic, records in sorted(batch.lags.items()):
                label = self._label(topic)
                lags[label] = lags.get(label, 0) + records
            # A topic that is gone has no lag any more.
            self._lag.clear()
            for label, records in lags.items():
                self._lag.labels(label).set(records)
        self._gateways = batch.gateways
        self._last = batch
        self._step()
        self._commit_s = self._progress_s
        self._commit.set_to_current_time()

    def _step(self) -> None:
        self._progress_s = self._now_s()
        self._progress.set_to_current_time()

    def _label(self, topic: str) -> str:
        if topic not in self._labels and len(self._labels) >= TOPICS_MAX:
            return OTHERS
        self._labels.add(topic)
        return topic

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"sluice_ingest_{name}", words, labels, registry=self._registry)


class _Gateways:
    """Figures of gateways, as a batch saw them. They are many, so they are written out only when somebody asks."""

    def __init__(self, now: Callable[[], Sequence[GatewayNow]]) -> None:
        self._now = now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the figures. The registry calls it."""
        gateways = self._now()
        levels = _family("gateways", "Gateways by what is worst about them.", "level")
        counts = Counts(gateway.level for gateway in gateways)
        for level in (*IN_TROUBLE, WELL):
            levels.add_metric([level], counts[level])
        newest = _family("newest_heartbeat_timestamp_seconds", "When Kafka had the newest heartbeat of all gateways.")
        if times_us := [gateway.heard_us for gateway in gateways if gateway.heard_us is not None]:
            newest.add_metric([], max(times_us) / 1e6)
        heard = _family(
            "gateway_heard_timestamp_seconds", "When Kafka had the gateway's newest heartbeat.", *GATEWAY_LABELS
        )
        depth = _family("gateway_depth_rows", "Rows that waited in the gateway's buffer.", *GATEWAY_LABELS)
        condition = _family("gateway_condition", "1 while the gateway has it.", *GATEWAY_LABELS, "level", "code")
        for gateway in gateways[:GATEWAYS_MAX]:
            labels = [gateway.namespace, gateway.gateway, gateway.site or ""]
            if gateway.heard_us is not None:
                heard.add_metric(labels, gateway.heard_us / 1e6)
            if gateway.depth_rows is not None:
                depth.add_metric(labels, gateway.depth_rows)
            codes = {(each.level, each.code if each.code in _KNOWN else OTHERS) for each in gateway.troubles}
            for code in sorted(codes):
                condition.add_metric([*labels, *code], 1)
        yield from (levels, newest, heard, depth, condition)


def _family(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"sluice_ingest_{name}", words, labels=labels)
