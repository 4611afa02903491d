"""One batch's rows of `device_parts`, on their way into the table."""

from pyspark.sql import DataFrame

from spark.arrow_pass.tasks import table_folder
from spark.engine.delta_staging import AppendTable
from spark.engine.made_file import MadeFile
from spark.ingest.census import Census, counted_again
from spark.log.copies import NO_SUSPECTS, Suspects
from spark.log.device_parts import SKIPPING_COLUMNS, came_again
from spark.log.log_table import ORDINAL


class DevicesAppend:
    """The rows, which are not committed yet."""

    def __init__(self, table: AppendTable, ordinal: int) -> None:
        self._table = table
        self.ordinal = ordinal
        self._append = table.begin()

    def take(self, files: list[MadeFile]) -> None:
        """Take the rows that a pass made."""
        self._append.take(files)

    def write(self, rows: DataFrame) -> Census:
        """Write the rows that follow from a batch's rows of `log`, and return the census of these, read once."""
        folder = table_folder(self._table.path, "", SKIPPING_COLUMNS)
        census, files = counted_again(rows, folder, self.ordinal)
        self._append.take(files)
        return census

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
