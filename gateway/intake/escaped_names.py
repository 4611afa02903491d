"""Writes names that break the rule of names (`Wohnzimmer Lampe`, `aa:bb:cc:dd:ee:ff`) as names that keep it, and back.

A name that follows the rule stays as it is. Any other begins with `x--`. Each run of UTF-8 bytes that are no letter,
digit, `.` or `_` is written as hex digits between two `-`: `x--Wohnzimmer-20-Lampe`. A name that itself begins with
`x--` is written so too. So no two names become one.
"""

import re

BEGINNING = "x--"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OTHERS = re.compile(rb"[^A-Za-z0-9._]+")


def escape(name: str) -> str:
    """Write any name by the rule of names. Its length alone may break the rule: it may be above 63."""
    if _PLAIN.fullmatch(name) and not name.startswith(BEGINNING):
        return name
    return BEGINNING + _OTHERS.sub(lambda run: b"-%s-" % run[0].hex().upper().encode(), name.encode()).decode()


def original(name: str) -> str | None:
    """Return the name that `escape` has written so; None if it has not. The inverse of `escape`."""
    if not name.startswith(BEGINNING):
        return None
    parts = name[len(BEGINNING) :].split("-")
    try:
        # Text and hex digits take turns.
        found = b"".join(bytes.fromhex(part) if place % 2 else part.encode() for place, part in enumerate(parts))
        text = found.decode()
    except ValueError:
        return None
    # Several texts decode to one name, but `escape` writes only one of them.
    return text if escape(text) == name else None


def original_device(device: str) -> str | None:
    """Return a device's name as its sensor or its broker has it, if `escape` has changed it; else None."""
    parts = [original(part) or part for part in device.split("/")] if BEGINNING in device else [device]
    told = "/".join(parts)
    return None if told == device else told
