"""Finds the copies of one batch's records, in it and in earlier batches, and judges them anew."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import READING_TYPE
from spark.log.copies import Suspects, judged, suspected
from spark.windows.windows_table import unwindowed


@dataclass(frozen=True, slots=True)
class ToldApart:
    """Counts of judged copies."""

    amended: int
    """Records of earlier batches whose verdict changed."""
    duplicates: int
    """Duplicates in this batch."""
    conflicts: int
    """Conflicts in this batch."""
    unwindowed: int
    """Readings among these duplicates and conflicts whose time belongs to no window."""


NONE_FOUND = ToldApart(0, 0, 0, 0)


class Copies:
    """The records of a batch that came again, with their copies in earlier batches and the verdicts."""

    def __init__(self, rows: DataFrame, earlier: DataFrame, suspects: Suspects, kept: Column, ordinal: int) -> None:
        """Judge the batch's `rows` with `earlier` rows, amendments applied. `copies.judged` explains `kept`."""
        in_batches = F.lit(False)
        for first, last in suspects.batches:
            in_batches |= F.col("ordinal").between(first, last)
        found = suspected(earlier.where(in_batches), suspects).unionByName(suspected(rows, suspects))
        was = found.withColumn("was", F.struct("duplicate", "reject_reason"))
        self._judged = judged(was, kept).persist()
        self._ordinal = ordinal
        self.counts = self._count()

    def of_batch(self) -> DataFrame:
        return self._judged.where(F.col("ordinal") == self._ordinal)

    def of_earlier_batches(self) -> DataFrame | None:
        """The records of earlier batches whose verdict changed; None if there are none."""
        return self._judged.where(self._is_amended()).drop("was") if self.counts.amended else None

    def _is_amended(self) -> Column:
        changed = ~F.struct("duplicate", "reject_reason").eqNullSafe(F.col("was"))
        return (F.col("ordinal") < self._ordinal) & changed

    def _count(self) -> ToldApart:
        of_batch = F.col("ordinal") == self._ordinal
        is_conflict = F.col("reject_reason").isNotNull()
        no_reading = (F.col("ce_type") == READING_TYPE) & (F.col("duplicate") | is_conflict)
        (row,) = self._judged.agg(
            F.count_if(self._is_amended()).alias("amended"),
            F.count_if(of_batch & F.col("duplicate")).alias("duplicates"),
            F.count_if(of_batch & is_conflict).alias("conflicts"),
            F.count_if(of_batch & no_reading & unwindowed()).alias("unwindowed"),
        ).collect()
        return ToldApart(**row.asDict())

    def close(self) -> None:
        self._judged.unpersist()
