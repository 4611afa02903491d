"""Saves the driver's state now and then to a Delta table, so that a start need not read all of `log`.

`log` is the truth. At a start, batches that `log` has since the last save are counted again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar, cast

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StringType, StructField, StructType

from spark.engine.delta_folds import fold_due
from spark.engine.delta_staging import AppendTable, make_table, pinned, with_missing_columns
from spark.log.log_table import ORDINAL

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
        most: int | None = None,
    ) -> None:
        """Open the table, or make it. `columns` are the columns of a state in DDL, and `encode` gives their values.

        With `most`, only so many states stay in memory: those that were put last.
        """
        self._spark = spark
        self._key = key
        self._decode = decode
        self._encode = encode
        self._most = most
        names = ", ".join(f"{name} string" for name in key)
        schema = cast("StructType", StructType.fromDDL(f"{names}, {columns}, ordinal bigint"))
        make_table(spark, path, schema)
        self._table = AppendTable(spark, path, schema)
        self.changed_keys: set[Key] = set()
        """Keys whose states have changed since the last `save`."""
        self.states: dict[Key, State] = {}
        """States in memory, in the order in which they were put."""
        self._are_all_here = True
        if self.saved >= 0:
            rows = read_states(spark, path, key).orderBy(F.desc("ordinal"))
            self._read(rows if most is None else rows.limit(most + 1))
            self._forget()

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that the table holds."""
        return self._table.last(ORDINAL)

    def put(self, key: Key, state: State) -> None:
        """Set a key's state. The same state again is no change."""
        if self.states.get(key) != state:
            self.put_last(key, state)

    def put_last(self, key: Key, state: State) -> None:
        """Set a key's state, which may have been changed in its place."""
        self.states.pop(key, None)
        self.states[key] = state
        self.changed_keys.add(key)

    def recall(self, keys: Iterable[Key]) -> None:
        """Look up states that are not in memory, all of them in one query."""
        absent = [] if self._are_all_here else [key for key in keys if key not in self.states]
        if absent:
            wanted = self._spark.createDataFrame(absent, ", ".join(f"{name} string" for name in self._key))
            states = read_states(self._spark, self._table.path, self._key)
            self._read(states.join(F.broadcast(wanted), [*self._key], "left_semi"))

    def save(self, ordinal: int, numbers: Mapping[str, int] | None = None) -> None:
        """Write the states that have changed since the last time. `ordinal` is the last batch in them."""
        rows = [(*key, *self._encode(self.states[key]), ordinal) for key in self.changed_keys]
        frame = self._spark.createDataFrame(rows, self._table.schema).coalesce(1)
        self._table.append(frame, {ORDINAL: ordinal, **(numbers or {})})
        self.changed_keys.clear()
        self._forget()
        # Here, not in upkeep, so that short runs fold the table too.
        fold_due(self._table, lambda rows, _: _newest(rows, self._key).coalesce(1))

    def _read(self, rows: DataFrame) -> None:
        for row in reversed(rows.collect()):
            self.states[cast("Key", tuple(row[name] for name in self._key))] = self._decode(row)

    def _forget(self) -> None:
        """Drop states that were put longest ago, if too many are in memory. They must be saved."""
        gone = [] if self._most is None else [*self.states][: max(len(self.states) - self._most, 0)]
        for key in gone:
            del self.states[key]
            self._are_all_here = False


def read_states(spark: SparkSession, path: str, key: tuple[str, ...]) -> DataFrame:
    """Return the last saved states of a table, a row for each key."""
    names = StructType([StructField(name, StringType()) for name in key])
    # A part of the key that an earlier release did not write is empty.
    return _newest(with_missing_columns(pinned(spark, path), names).fillna("", [*key]), key)


def _newest(rows: DataFrame, key: tuple[str, ...]) -> DataFrame:
    """The last saved row of each key."""
    return rows.groupBy(*key).agg(F.max_by(F.struct("*"), "ordinal").alias("row")).select("row.*")
