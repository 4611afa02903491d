"""Finds the records of a batch that make it fail, by trying parts of it beside the tables.

Normally a bad record becomes a reject with a reason. If it raises an error instead, its batch fails each time, and no
later batch is ever read. So parts of the batch are tried in a warehouse of their own. A record is at fault if it fails
there alone, twice, while the others do not. If Kafka, a disk or Spark itself fails, no record is at fault: the job ends
as usual, and the next run goes on.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.record_rules import SET_ASIDE
from spark.source.kafka_failures import explain_failure, innermost, told_by
from spark.source.storage_failures import explain_storage

RECORD_FAULTS = (
    *(ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError, RecursionError),
    *(PySparkException, Py4JJavaError),
)
"""Types of errors that a record can cause. The job's own errors (topics, checkpoints, folders) are not among them."""
NO_RECORDS_FAULT = re.compile(
    r"RegistryError|ModuleNotFoundError|ImportError|java\.io\.IOException|java\.net\.|OutOfMemoryError|No space left"
    r"|Connection re(?:fused|set)"
    r"|ExecutorLost|SparkContext (?:was|has been) (?:shut ?down|stopped)|cancell?ed|InterruptedException"
    r"|Python worker (?:exited|failed)|maxResultSize"
)
"""Pattern of errors of Spark, its hosts, or services that it asks."""
_OF_PYTHON = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""Pattern of an error in Python on an executor: the line behind a traceback."""
TRIALS_MAX = 200
"""Parts of one batch that are tried. Some forty find one record among 200,000."""
ASIDE_MAX = 20
"""Records of one batch that are set aside. If more fail, the program must be mended first."""
REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition. Both ends are inclusive."""

    topic: str
    partition: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Culprit:
    """A record that cannot be taken."""

    topic: str
    partition: int
    offset: int
    reason: str
    """Reason of its reject."""

    def words(self) -> str:
        """The message for a person."""
        return (
            f"the record at offset {self.offset} of partition {self.partition} of {self.topic} made its batch "
            f"fail, and was set aside ({self.reason}). All others were taken. It stands in `quarantine`, with its "
            "bytes: report it, and replay once the program is mended."
        )


Attempt = Callable[[Column], Exception | None]
"""Function that tries the records for which a condition is true, and returns the error that this raised."""


def may_be_a_records(error: BaseException) -> bool:
    """Tell whether a record may have caused an error."""
    if not isinstance(error, RECORD_FAULTS) or explain_failure(error) or explain_storage(error):
        return False
    return NO_RECORDS_FAULT.search(told_by(error)) is None


def find_culprits(records: DataFrame, attempt: Attempt) -> list[Culprit]:
    """Find the records of a failed batch that fail alone; none if no record is at fault.

    `records` have Kafka's coordinates. All of them together have failed before.
    """
    # A trial without any record must succeed, or no record is at fault. Spark cannot know that no record meets the
    # condition, and so it still reads everything.
    if attempt(F.col("offset") < 0) is not None:
        return []
    found: list[Culprit] = []
    failing = [_spans_of(records)]
    trials = 1
    while failing:
        part = failing.pop()
        if sum(span.size for span in part) == 1:
            # Try it once more: a failure that comes now and then must not set aside good records.
            error = attempt(within(part))
            if error is None or not may_be_a_records(error):
                return []
            found.append(Culprit(part[0].topic, part[0].partition, part[0].first, _reason(error)))
            continue
        worse = [half for half in _halves(part) if attempt(within(half)) is not None]
        trials += 2
        if not worse or trials > TRIALS_MAX or len(found) + len(failing) + len(worse) > ASIDE_MAX:
            return []
        failing += worse
    return found


def within(spans: Sequence[Span]) -> Column:
    """True for records in one of these spans."""
    each = (
        (F.col("topic") == span.topic)
        & (F.col("partition") == span.partition)
        & F.col("offset").between(span.first, span.last)
        for span in spans
    )
    return reduce(or_, each, F.lit(False))


def is_culprit(culprits: Sequence[Culprit]) -> Column:
    """True for these records."""
    return within([Span(each.topic, each.partition, each.offset, each.offset) for each in culprits])


def reason_of(culprits: Sequence[Culprit]) -> Column:
    """The reason of a record that is a culprit; null for others."""
    reasons = F.lit(None).cast("string")
    for each in culprits:
        reasons = F.when(is_culprit([each]), each.reason).otherwise(reasons)
    return reasons


def as_rejects(typed: DataFrame, culprits: Sequence[Culprit]) -> DataFrame:
    """Mark culprits among records of `typed_records` as rejects, so that their values are not decoded."""
    # A fault of the headers stays: a replay depends on it.
    return typed.withColumn("header_fault", F.coalesce(F.col("header_fault"), reason_of(culprits)))


def as_bytes(typed: DataFrame, culprits: Sequence[Culprit]) -> DataFrame:
    """Mark culprits as rejects and null their typed columns, for records whose columns themselves raise."""
    kept = {"topic", "partition", "offset", "kafka_timestamp", "key", "value", "headers", "topic_id", "ingest", "batch"}
    aside = typed.where(is_culprit(culprits)).select(
        *(
            F.col(field.name) if field.name in kept else F.lit(None).cast(field.dataType).alias(field.name)
            for field in typed.schema
        )
    )
    return typed.where(~is_culprit(culprits)).unionByName(as_rejects(aside, culprits))


def _spans_of(records: DataFrame) -> list[Span]:
    ends = records.groupBy("topic", "partition").agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
    return sorted((Span(*row) for row in ends.collect()), key=lambda span: (span.topic, span.partition))


def _halves(part: Sequence[Span]) -> Iterator[list[Span]]:
    """Split spans into two halves of equal size."""
    left = sum(span.size for span in part) // 2
    first: list[Span] = []
    second: list[Span] = []
    for span in part:
        taken = min(left, span.size)
        left -= taken
        if taken:
            first.append(Span(span.topic, span.partition, span.first, span.first + taken - 1))
        if taken < span.size:
            second.append(Span(span.topic, span.partition, span.first + taken, span.last))
    yield first
    yield second


def _reason(error: Exception) -> str:
    of_python = _OF_PYTHON.search(told_by(error))
    if of_python is not None:
        said = of_python[1]
    elif isinstance(error, (PySparkException, Py4JJavaError)):
        said = f"{type(error).__name__}: {innermost(error)}"
    else:
        said = f"{type(error).__name__}: {error}"
    return f"{SET_ASIDE}taking it raised {' '.join(said.split())[:REASON_CHARS_MAX]}"
