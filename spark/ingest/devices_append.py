"""One batch's rows of `device_parts`, on their way into the table."""

from pyspark.sql import DataFrame

from spark.arrow_pass.plan import COUNTED_COLUMNS
from spark.engine.arrow_map import map_in_arrow
from spark.engine.delta_staging import AppendTable
from spark.engine.made_file import MadeFile
from spark.log.copies import NO_SUSPECTS, Suspects
from spark.log.device_parts import SCHEMA, came_again
from spark.log.log_table import LOG_PARTITION, ORDINAL


class DevicesAppend:
    """The rows, which are not committed yet."""

    def __init__(self, table: AppendTable, ordinal: int) -> None:
        self._table = table
        self.ordinal = ordinal
        self._append = table.begin()

    def take(self, files: list[MadeFile]) -> None:
        """Take the rows that a pass made."""
        self._append.take(files)

    def write(self, rows: DataFrame) -> None:
        """Write the rows that follow from a batch's rows of `log`."""
        # Executors may lack Delta: the function must come from a module that does without.
        from spark.arrow_pass.row_counts import devices_in  # noqa: PLC0415 - it needs Arrow

        counted = rows.select(*COUNTED_COLUMNS, LOG_PARTITION)
        self._append.write(map_in_arrow(counted, devices_in(self.ordinal), SCHEMA))

    def came_again(self, counted: int) -> Suspects:
        """Find numbers that came before, or in two rows. `counted` is how many readings have a number of their own."""
        if not counted:
            return NO_SUSPECTS
        earlier = self._table.spark.read.format("delta").load(self._table.path)
        return came_again(self._append.rows(), earlier.where(f"batch_first < {self.ordinal}"))

    def commit(self) -> None:
        """Commit the rows, unless an earlier attempt has committed them."""
        if self._table.last(ORDINAL) < self.ordinal:
            self._append.commit({ORDINAL: self.ordinal})
