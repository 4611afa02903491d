"""Saves the driver's state now and then to a Delta table, so that a start need not read all of `log`.

`log` is the truth. At a start, batches that `log` has since the last save are counted again.
"""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StringType, StructField, StructType

from spark.engine.delta_staging import AppendTable, make_table, pinned, with_missing_columns
from spark.log.log_table import ORDINAL

REWRITE_FACTOR = 8
"""Rows for each key above which the table is rewritten with one row for each key."""

Key = TypeVar("Key", bound=tuple[str, ...])
State = TypeVar("State")


class StateTable(Generic[Key, State]):
    """States by key: now in memory, and as of the last `save` in a Delta table. A key's last row counts."""

    def __init__(  # noqa: PLR0913 - the parts of a table
        self,
        spark: SparkSession,
        path: str,
        *,
        key: tuple[str, ...],
        columns: str,
        decode: Callable[[Row], State],
        encode: Callable[[State], tuple[object, ...]],
    ) -> None:
        """Open the table, or make it. `columns` are the columns of a state in DDL, and `encode` gives their values."""
        self._spark = spark
        self._encode = encode
        names = ", ".join(f"{name} string" for name in key)
        schema = cast("StructType", StructType.fromDDL(f"{names}, {columns}, ordinal bigint"))
        make_table(spark, path, schema)
        self._table = AppendTable(spark, path, schema)
        self.changed_keys: set[Key] = set()
        """Keys whose states have changed since the last `save`."""
        self._rows = 0
        self.states: dict[Key, State] = {}
        if self.saved >= 0:
            for row in _by_key(spark, path, key).select("row.*", "rows").collect():
                self.states[cast("Key", tuple(row[name] for name in key))] = decode(row)
                # Counted, so that short runs too rewrite the table in time.
                self._rows += row.rows

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that the table holds."""
        return self._table.last(ORDINAL)

    def put(self, key: Key, state: State) -> None:
        """Set a key's state. The same state again is no change."""
        if self.states.get(key) != state:
            self.states[key] = state
            self.changed_keys.add(key)

    def number(self, application: str) -> int:
        """The number last saved for an application; -1 if there is none."""
        return self._table.last(application)

    def save(self, ordinal: int, numbers: Mapping[str, int] | None = None) -> None:
        """Write the states that have changed since the last time. `ordinal` is the last batch in them."""
        whole = self._rows > REWRITE_FACTOR * len(self.states)
        keys = self.states.keys() if whole else self.changed_keys
        rows = self._spark.createDataFrame(
            [(*key, *self._encode(self.states[key]), ordinal) for key in keys], self._table.schema
        ).coalesce(1)
        self._table.append(rows, {ORDINAL: ordinal, **(numbers or {})}, instead_of="true" if whole else None)
        self._rows = 0 if whole else self._rows + len(keys)
        self.changed_keys.clear()


def read_states(spark: SparkSession, path: str, key: tuple[str, ...]) -> DataFrame:
    """Return the last saved states of a table, a row for each key."""
    return _by_key(spark, path, key).select("row.*")


def _by_key(spark: SparkSession, path: str, key: tuple[str, ...]) -> DataFrame:
    """The last saved row of each key, and how many rows it has."""
    names = StructType([StructField(name, StringType()) for name in key])
    # A part of the key that an earlier release did not write is empty.
    table = with_missing_columns(pinned(spark, path), names).fillna("", [*key])
    return table.groupBy(*key).agg(F.max_by(F.struct("*"), "ordinal").alias("row"), F.count("*").alias("rows"))
