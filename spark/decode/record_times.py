"""Times of records as whole microseconds since 1970. It needs no Spark."""

import re
from datetime import UTC, datetime

DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The years 0 and 1 are left out, because Python cannot hold all of their times. Python 3.14 takes the hour 24.
_RFC3339 = re.compile(
    r"(?!000[01])[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}\.[0-9]{6}Z", re.ASCII
)


def microseconds(time: datetime) -> int:
    """Microseconds since 1970 of a time with a zone."""
    passed = time - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def rfc3339_us(text: str) -> int | None:
    """Microseconds since 1970 of a time in RFC 3339, in UTC and with microseconds; None if the text is no such time."""
    if _RFC3339.fullmatch(text) is None:
        return None
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError:
        return None
