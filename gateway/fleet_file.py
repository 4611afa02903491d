"""Reads `fleet.toml`: which version and settings a fleet's gateways are to have. docs/fleet.md describes the file.

A box finds here what is for it, and the cloud side finds the same for all boxes.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from gateway.settings import Hours, Name, Settings
from gateway.toml_files.mistakes import Place, lines_of, show
from gateway.toml_files.reader import read_text, read_toml
from gateway.toml_files.schema import Schema, converted

NAME: Final = "fleet.toml"
BYTES_MAX: Final = 1_000_000
WISH_DIGITS: Final = 16
"""Hexadecimal digits of a wish's digest: enough to tell wishes apart."""
Version = Annotated[str, Meta(pattern=r"^[0-9][A-Za-z0-9.+~-]{0,99}\Z", description='a version, such as "1.2.0"')]
_PATTERN: Final = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,62}/[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,62}")
_DAY_MINUTES: Final = 24 * 60
_OF_THE_BOX: Final[Mapping[Place, str]] = {
    ("gateway", "id"): "is each box's own name",
    ("gateway", "namespace"): "is part of each box's own name",
    ("buffer", "path"): "would leave the readings behind that wait in the former file",
    ("fleet",): "says where the box finds this file: a wrong address could not be mended from afar",
    ("mqtt_listener", "users"): "holds digests of secrets, and whoever reaches the folder can read this file",
    ("mqtt_listener", "operators"): "holds digests of secrets, and whoever reaches the folder can read this file",
    ("mqtt_brokers", "password"): "is a secret, and whoever reaches the folder can read this file",
}
"""Settings that no file of a fleet may change, and the reasons."""
_DEPTH: Final = len(("groups", 0, "settings"))
"""Parts of a place in the file before that of a setting in gateway.toml."""


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[groups]]`: gateways, and what they are to have."""

    name: Name
    gateways: tuple[str, ...]
    """Gateways as `namespace/id`, or patterns such as `north/*`."""
    version: Version | None = None
    """Version that the gateways are to run."""
    allow_downgrade: bool = False
    """Whether the version may be older than the installed one."""
    settings: dict[str, Any] = {}
    """Settings that the gateways are to have, as gateway.toml has them."""
    share: Annotated[int, Meta(ge=0, le=100, description="per cent, a whole number from 0 to 100")] = 100
    """Share of the group's gateways that are to change now, in per cent."""
    hours: Hours | None = None
    """Hours of the day (UTC) in which a change may begin."""
    attempt: Annotated[int, Meta(ge=1, le=1_000_000, description="a whole number from 1")] = 1
    """Raised by one, it has gateways that gave this wish up try it again."""

    @property
    def wish(self) -> str:
        """Digest of what the group is to have. Another one is another change."""
        return _digest((self.version, self.settings, self.attempt))

    def is_drawn(self, gateway: str) -> bool:
        """Whether a gateway belongs to the share. A larger share has those of a smaller one, and some more."""
        return self.draw(gateway) < self.share

    def draw(self, gateway: str) -> int:
        """The largest share in per cent, 0 to 99, that a gateway does not belong to."""
        # Another attempt is for those that were drawn before.
        drawn = hashlib.sha256(f"{_digest((self.version, self.settings))} {gateway}".encode()).digest()
        return int.from_bytes(drawn[:8], "big") % 100


def _digest(plain: object) -> str:
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:WISH_DIGITS]


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `fleet.toml`."""

    serial: Annotated[int, Meta(ge=1, le=2**53, description="a whole number from 1 that rises with each change")]
    groups: tuple[Group, ...] = ()

    def group_of(self, gateway: str) -> Group | None:
        """The first group that names a gateway (`namespace/id`); None if none does."""
        return next(
            (group for group in self.groups if any(fnmatchcase(gateway, each) for each in group.gateways)), None
        )


def is_within(hours: str | None, moment: datetime) -> bool:
    """Whether a moment (UTC) lies in hours such as `22:00-05:00`. None is the whole day, and so are equal ends."""
    if hours is None:
        return True
    begin, end = (int(each[:2]) * 60 + int(each[3:]) for each in hours.split("-"))
    length = (end - begin) % _DAY_MINUTES or _DAY_MINUTES
    return (moment.hour * 60 + moment.minute - begin) % _DAY_MINUTES < length


def with_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document of gateway.toml with changes of `settings`. Sections are merged, and lists replaced."""
    merged = dict(document)
    for name, value in changes.items():
        before = merged.get(name)
        is_section = isinstance(before, dict) and isinstance(value, dict)
        merged[name] = with_changes(before or {}, value) if is_section else value
    return merged


def load(path: Path) -> Fleet:
    """Read and check a file. Settings that this version does not know pass: another may. Raises ConfigError."""
    return parse(_read(path), path)


def load_known(path: Path) -> Fleet:
    """Read and check a file, with names and values of settings as this version has them. Raises ConfigError."""
    text = _read(path)
    fleet = parse(text, path)
    _SCHEMA.require_none(_setting_mistakes(fleet), lines_of(text), path)
    return fleet


def parse(text: str, path: Path) -> Fleet:
    """Check a file's text; `path` is for messages. See `load`."""
    document, lines = read_toml(text, path), lines_of(text)
    _SCHEMA.require_none(_SCHEMA.mistakes(document), lines, path)
    fleet = converted(document, Fleet)
    _SCHEMA.require_none(_meaning_mistakes(fleet), lines, path)
    return fleet


def _read(path: Path) -> str:
    advice: Mapping[type[Exception], str] = {FileNotFoundError: "there is no such file; name the fleet's file"}
    return read_text(path, advice, BYTES_MAX)


class _Changes(Schema):
    """Changes of gateway.toml: whatever is left out stays as a box has it."""

    def may_miss(self, place: Place) -> bool:
        # A list is replaced as a whole, so its sections are whole.
        return not any(isinstance(part, int) for part in place)


_SCHEMA = Schema(Fleet)
_CHANGES = _Changes(Settings)


def _meaning_mistakes(fleet: Fleet) -> Iterator[tuple[Place, str]]:
    names: dict[str, int] = {}
    named: dict[str, str] = {}
    for index, group in enumerate(fleet.groups):
        place: Place = ("groups", index)
        if names.setdefault(group.name, index) != index:
            yield (*place, "name"), f"{show(group.name)} is another group's name too; write another one"
        if not group.gateways:
            yield (*place, "gateways"), 'is empty; write gateways, such as ["north/barn-1"], or patterns ("north/*")'
        for gateway in group.gateways:
            if _PATTERN.fullmatch(gateway) is None:
                told = "is no gateway; write namespace/id as sluice-cloud gateways has them, or a pattern (north/*)"
                yield (*place, "gateways"), f"{show(gateway)} {told}"
            elif (other := named.setdefault(gateway, group.name)) != group.name:
                told = f"is in the group {show(other)} too, and the first group counts; remove one of the two"
                yield (*place, "gateways"), f"{show(gateway)} {told}"
        if group.version is None and not group.settings:
            yield place, "wants nothing; write version, or settings below [groups.settings]"
        yield from _refused(group.settings, (*place, "settings"))


def _setting_mistakes(fleet: Fleet) -> Iterator[tuple[Place, str]]:
    for index, group in enumerate(fleet.groups):
        yield from (
            (("groups", index, "settings", *place), words) for place, words in _CHANGES.mistakes(group.settings)
        )


def _refused(value: object, place: Place) -> Iterator[tuple[Place, str]]:
    """Find settings that must not be changed."""
    if isinstance(value, list):
        for index, element in enumerate(value):
            yield from _refused(element, (*place, index))
    elif isinstance(value, dict):
        for name, element in value.items():
            here = (*place, name)
            why = _OF_THE_BOX.get(tuple(part for part in here[_DEPTH:] if isinstance(part, str)))
            if why is not None:
                yield here, f"{why}; remove it here"
            else:
                yield from _refused(element, here)
