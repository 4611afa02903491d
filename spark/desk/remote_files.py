"""Lets DuckDB read files of Delta tables where deltalake reads them, such as an object store.

DuckDB asks for the parts of a file that a query needs, and deltalake fetches them. Else each would need a login.
"""

from datetime import UTC, datetime
from itertools import count
from threading import Lock, get_ident
from typing import Any

from deltalake import DeltaTable
from deltalake._internal import DeltaFileSystemHandler
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

NAME = "delta"
"""Scheme of the URLs that DuckDB hands over."""


class RemoteFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of Delta tables, as DuckDB asks for them: `delta://NUMBER/FILE`."""

    protocol = NAME
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._unused = count()
        self._numbers: dict[str, int] = {}
        self._tables: dict[str, Any] = {}

    def folder_of(self, path: str, table: DeltaTable) -> str:
        """Return the URL of a table's folder."""
        # Several threads may ask at once: no two paths may get one number.
        number = self._numbers.setdefault(path, next(self._unused))
        # deltalake has it public for pyarrow alone.
        self._tables.setdefault(str(number), DeltaFileSystemHandler.from_table(table._table))  # noqa: SLF001
        return f"{NAME}://{number}"

    def open(self, path: str, *_arguments: object, **_options: object) -> "RemoteFile":
        """Open a file to be read."""
        return RemoteFile(self._opened(path))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return int(self._opened(path).size())

    def glob(self, path: str, *_arguments: object, **_options: object) -> list[str]:
        """Return the path itself: no character in it means others."""
        return [path]

    def modified(self, path: str) -> datetime:  # noqa: ARG002 - as fsspec has it
        """The same time for all: a file of a Delta table never changes."""
        return datetime(1970, 1, 1, tzinfo=UTC)

    def _opened(self, path: str) -> Any:
        number, _, name = path.removeprefix(f"{NAME}://").partition("/")
        return self._tables[number].open_input_file(name)


class RemoteFile:
    """A file that several threads read. DuckDB seeks and reads in two calls, so that each thread has its own place."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._places: dict[int, int] = {}
        self._reading = Lock()

    def seek(self, place: int) -> int:
        """Go to a byte."""
        self._places[get_ident()] = place
        return place

    def tell(self) -> int:
        """The place of the next byte."""
        return self._places.get(get_ident(), 0)

    def read(self, size: int) -> bytes:
        """Read so many bytes, or those that are left."""
        with self._reading:
            self._file.seek(self.tell())
            found = bytes(self._file.read(size))
        self.seek(self.tell() + len(found))
        return found

    def close(self) -> None:
        """End."""
        self._file.close()
