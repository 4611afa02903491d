"""User properties of MQTT 5 that go with a reading into Kafka: as one text, for the row that waits in between."""

import json
from collections.abc import Container, Iterable

import msgspec

_decode = msgspec.json.Decoder(tuple[tuple[str, str], ...]).decode


def text_of(properties: Iterable[tuple[str, str]], without: Container[str] = ()) -> str | None:
    """Write properties as a text, but for those of some names; None if none is left.

    The packet bounds their number and bytes. The text is ASCII, so SQLite and Python count the same length. A name that
    cannot be shown is no header's name.
    """
    kept = [(name, value) for name, value in properties if name not in without and name and name.isprintable()]
    return json.dumps(kept, separators=(",", ":")) if kept else None


def of_text(text: str | None) -> tuple[tuple[str, str], ...]:
    """Read properties from their text. Damaged ones are left out."""
    if text is None:
        return ()
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return ()
