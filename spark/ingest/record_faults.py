"""Finds the records of a batch that make it fail, by trying parts of it beside the tables.

Whatever a record holds, its readers say what is wrong with it. If one of them raises all the same, the batch fails
whenever it comes again, and nothing behind it is ever read. So parts of the batch are tried in a warehouse of their
own. A record that fails there alone, twice, while the others do not, is at fault. If Kafka, a disk or Spark itself
fails, no record is: the job ends as ever, and the next run goes on.
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

from spark.decode.payload_decode import SET_ASIDE
from spark.source.kafka_failures import explain_failure, innermost, told_by
from spark.source.storage_failures import explain_storage

RECORD_FAULTS = (
    *(ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError, RecursionError),
    *(PySparkException, Py4JJavaError),
)
"""Kinds of errors that a record can cause. The job's own (of topics, checkpoints, folders) are none of them."""
NO_RECORDS_FAULT = re.compile(
    r"RegistryError|ModuleNotFoundError|ImportError|java\.io\.IOException|java\.net\.|OutOfMemoryError|No space left"
    r"|Connection re(?:fused|set)"
    r"|ExecutorLost|SparkContext (?:was|has been) (?:shut ?down|stopped)|cancell?ed|InterruptedException"
    r"|Python worker (?:exited|failed)|maxResultSize"
)
"""What an error says where Spark, its machines or what it asks have failed."""
_OF_PYTHON = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""What was raised in Python on an executor: the line behind a traceback."""
TRIALS_MAX = 200
"""Parts that are tried of one batch: a record among 200,000 is found with some forty."""
ASIDE_MAX = 20
"""Records of one batch that are set aside. Where more fail, it is the program that is to be mended first."""
REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition, both ends included."""

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
    """Of its reject."""

    def words(self) -> str:
        """What a person is told."""
        return (
            f"the record at offset {self.offset} of partition {self.partition} of {self.topic} made its batch "
            f"fail, and was set aside ({self.reason}). All others were taken. It stands in `quarantine`, with its "
            "bytes: report it, and replay once the program is mended."
        )


Attempt = Callable[[Column], Exception | None]
"""Tries the records that a condition names; returns what that raised."""


def may_be_a_records(error: BaseException) -> bool:
    """Whether an error can be a record's fault, as far as it tells."""
    if not isinstance(error, RECORD_FAULTS) or explain_failure(error) or explain_storage(error):
        return False
    return NO_RECORDS_FAULT.search(told_by(error)) is None


def find_culprits(records: DataFrame, attempt: Attempt) -> list[Culprit]:
    """Find the records of a batch that failed which fail alone; none where the failure is not theirs.

    `records` have Kafka's coordinates. It is known that they fail together.
    """
    # What nothing is taken of must succeed, else it is no record's fault. It is a condition that Spark cannot foresee:
    # everything is read for it.
    if attempt(F.col("offset") < 0) is not None:
        return []
    found: list[Culprit] = []
    failing = [_spans_of(records)]
    trials = 1
    while failing:
        part = failing.pop()
        if sum(span.size for span in part) == 1:
            # Once more: what fails now and then must not set aside whatever it meets.
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
    """A condition on records: they lie in one of these spans."""
    each = (
        (F.col("topic") == span.topic)
        & (F.col("partition") == span.partition)
        & F.col("offset").between(span.first, span.last)
        for span in spans
    )
    return reduce(or_, each, F.lit(False))


def is_culprit(culprits: Sequence[Culprit]) -> Column:
    """Tell which records these are."""
    return within([Span(each.topic, each.partition, each.offset, each.offset) for each in culprits])


def reason_of(culprits: Sequence[Culprit]) -> Column:
    """The reason of each, where a record is one of these."""
    reasons = F.lit(None).cast("string")
    for each in culprits:
        reasons = F.when(is_culprit([each]), each.reason).otherwise(reasons)
    return reasons


def as_rejects(typed: DataFrame, culprits: Sequence[Culprit]) -> DataFrame:
    """Records as `typed_records` yields them, these marked as rejects: nobody looks into their values."""
    # What was wrong with headers before stays said: a replay goes by it.
    return typed.withColumn("header_fault", F.coalesce(F.col("header_fault"), reason_of(culprits)))


def as_bytes(typed: DataFrame, culprits: Sequence[Culprit]) -> DataFrame:
    """The same, these as places and bytes alone: where it is their columns that raise."""
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
    """Split spans in two of one size."""
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
