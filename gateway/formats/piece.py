"""A format and its pieces: all that a format of one's own imports. docs/formats.md says how to write one."""

from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """The first piece of the bytes that a format was shown. A plain one, without readings, is passed over."""

    length: int
    """Bytes of the piece: at least 1, at most all that were shown. They are not shown again."""
    readings: tuple[bytes, ...] = ()
    """Payloads, in the order of their measurements; mostly one JSON object in UTF-8."""
    damage: str = ""
    """Short reason if a reading was in the piece and cannot be read: small letters, digits and hyphens."""
    noise: bool = False
    """Whether bytes in the piece belong to no reading. They are counted, and are no loss."""


class Format(Protocol):
    """A format of one open port. It does no I/O and reads no clock."""

    bytes_max: int
    """Bytes of the longest piece. If so many hold no whole piece, they are damage (`TOO_LONG`)."""

    def cut(self, received: bytes) -> Piece | None:
        """Cut off the first piece of the bytes that were not cut off yet; None if its end has not come.

        `received` has 1 to `bytes_max` bytes.
        """
