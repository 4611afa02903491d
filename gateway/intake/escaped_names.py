"""Names that are no names by our rule (`Wohnzimmer Lampe`, `aa:bb:cc:dd:ee:ff`), written as ones that are, and back.

A name that follows the rule stays as it is. Any other begins with `x--`, and each run of bytes of its UTF-8 that are no
letter, digit, `.` or `_` stands in it as hex digits between two `-`: `x--Wohnzimmer-20-Lampe`. A name that begins with
`x--` by itself is written so too. So no two names become one.
"""

import re

BEGINNING = "x--"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OTHERS = re.compile(rb"[^A-Za-z0-9._]+")


def escape(name: str) -> str:
    """Write any name by the rule of names, but for its length: that may be above 63."""
    if _PLAIN.fullmatch(name) and not name.startswith(BEGINNING):
        return name
    return BEGINNING + _OTHERS.sub(lambda run: b"-%s-" % run[0].hex().upper().encode(), name.encode()).decode()


def original(name: str) -> str | None:
    """Return the name that `escape` has written so; None where it has not. The inverse of `escape`."""
    if not name.startswith(BEGINNING):
        return None
    parts = name[len(BEGINNING) :].split("-")
    try:
        # Text and hex digits take turns.
        found = b"".join(bytes.fromhex(part) if place % 2 else part.encode() for place, part in enumerate(parts))
        text = found.decode()
    except ValueError:
        return None
    # Of all that reads as the same name, one way of writing is ours.
    return text if escape(text) == name else None


def original_device(device: str) -> str | None:
    """Return a device's name as its sensor or its broker has it, where `escape` has changed it; else None.

    It may have several parts (`north/x--Wohnzimmer-20-Lampe`).
    """
    parts = [original(part) or part for part in device.split("/")] if BEGINNING in device else [device]
    told = "/".join(parts)
    return None if told == device else told
