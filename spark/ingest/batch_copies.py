"""Finds the copies of one batch's records, in it and in earlier batches, and judges them anew."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import READING_TYPE
from spark.log.copies import JUDGED, Suspects, judged, suspected, with_verdicts
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
    otherwise: int = 0
    """Records of this batch that were written with another verdict."""
    aside: int = 0
    """Records that were set aside."""
    counting: int = 0
    """Records among these that are neither duplicates nor conflicts."""


NONE_FOUND = ToldApart(0, 0, 0, 0)


class Copies:
    """The records of a batch that came again, with their copies in earlier batches and the verdicts."""

    def __init__(  # noqa: PLR0913, PLR0917 - all that decides
        self,
        rows: DataFrame,
        aside: DataFrame | None,
        earlier: DataFrame,
        suspects: Suspects,
        kept: Column,
        ordinal: int,
    ) -> None:
        """Judge the batch's `rows`, and those that were set aside, with `earlier` rows, amendments applied.

        `copies.judged` explains `kept`.
        """
        in_batches = F.lit(False)
        for first, last in suspects.batches:
            in_batches |= F.col("ordinal").between(first, last)
        self._earlier = earlier.where(in_batches)
        self._amended: DataFrame | None = None
        verdict = F.struct("duplicate", "reject_reason")
        every = self._earlier.select(*JUDGED).unionByName(rows.select(*JUDGED)).withColumn("was", verdict)
        if aside is not None:
            # These have no verdict yet.
            every = every.unionByName(aside.select(*JUDGED).withColumn("was", F.when(F.lit(False), verdict)))
        self._judged = judged(suspected(every, suspects), kept).persist()
        self._ordinal = ordinal
        self.counts = self._count()

    def of_batch(self) -> DataFrame:
        """The verdicts on the batch's records that came again, in the columns JUDGED."""
        return self._judged.where(F.col("ordinal") == self._ordinal)

    def of_earlier_batches(self) -> DataFrame | None:
        """The records of earlier batches whose verdict changed; None if there are none."""
        if self._amended is None and self.counts.amended:
            said = self._judged.where(self._is_amended())
            self._amended = with_verdicts(self._earlier, said, "inner").persist()
        return self._amended

    def _is_amended(self) -> Column:
        return (F.col("ordinal") < self._ordinal) & _is_changed()

    def _count(self) -> ToldApart:
        of_batch, is_aside = F.col("ordinal") == self._ordinal, F.col("was").isNull()
        is_conflict = F.col("reject_reason").isNotNull()
        no_reading = (F.col("ce_type") == READING_TYPE) & (F.col("duplicate") | is_conflict)
        (row,) = self._judged.agg(
            F.count_if(self._is_amended()).alias("amended"),
            F.count_if(of_batch & F.col("duplicate")).alias("duplicates"),
            F.count_if(of_batch & is_conflict).alias("conflicts"),
            F.count_if(of_batch & no_reading & unwindowed()).alias("unwindowed"),
            F.count_if(of_batch & ~is_aside & _is_changed()).alias("otherwise"),
            F.count_if(is_aside).alias("aside"),
            F.count_if(is_aside & ~F.col("duplicate") & ~is_conflict).alias("counting"),
        ).collect()
        return ToldApart(**row.asDict())

    def close(self) -> None:
        self._judged.unpersist()
        if self._amended is not None:
            self._amended.unpersist()


def _is_changed() -> Column:
    return ~F.struct("duplicate", "reject_reason").eqNullSafe(F.col("was"))
