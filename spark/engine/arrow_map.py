"""Applies a function to a DataFrame's rows on executors, as batches of Arrow.

It does what `DataFrame.mapInArrow` does. That one wants pandas on the driver, where nothing uses it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import DataFrame
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    import pyarrow as pa

Task = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def map_in_arrow(rows: DataFrame, task: Task, schema: StructType | str) -> DataFrame:
    """Apply a function to the batches of each partition. It yields batches with the columns of `schema`."""
    function = UserDefinedFunction(task, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = cast("Any", function(*(rows[name] for name in rows.columns)))
    mapped = cast("Any", rows)._jdf.mapInArrow(column._jc, False, None)  # noqa: SLF001 - as PySpark does
    return ClassicDataFrame(mapped, rows.sparkSession)
