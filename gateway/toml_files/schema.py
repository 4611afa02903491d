"""Checks a TOML document against its structs, and yields every mistake with its place and the correction."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields

from gateway.toml_files.mistakes import ConfigError, Mistake, Place, line_of, show, spell

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that no text of a file may hold."""
Found = Iterable[tuple[Place, str]]
"""Mistakes: the place of each, and the words that follow its name."""
_T = TypeVar("_T")


class Schema:
    """What one file may say: the struct of its document. A file's module overrides the words that are its own."""

    noun: ClassVar = "setting"
    control: ClassVar = (
        "no path, address, name or topic can hold; remove it, and where a backslash is meant, "
        "write the text in single quotes"
    )
    """End of the sentence about a control character."""
    needed: ClassVar[Mapping[type[Struct], str]] = {}
    """Settings that may not be left out although they have a default."""

    def __init__(self, root: type[Struct]) -> None:
        self.root = root

    def elsewhere(self, _place: Place, _key: str) -> str:
        """Say how an unknown name of a section is set instead; empty if that is unknown too."""
        return ""

    def namesakes(self, _key: str) -> str:
        """Say which other sections have a setting of this name; empty if none has."""
        return ""

    def misplaced(self, _place: Place, _value: object) -> str:
        """Say where a value belongs that stands among values by name; empty if it may stand there."""
        return ""

    def missing(self, place: Place, hint: object) -> tuple[Place, str]:
        """Tell of a setting that is missing."""
        return place, f"is missing; write {place[-1]} = {wanted(hint)}"

    def instead(self, hint: object, _value: object, _place: Place) -> str:
        """Say what to write instead of a wrong value."""
        return wanted(hint)

    def may_miss(self, _place: Place) -> bool:
        """Whether a needed setting may be left out, as in a change of another file."""
        return False

    def is_secret(self, _place: Place) -> bool:
        """Whether no value of this place may be shown."""
        return False

    def spell(self, place: Place) -> str:
        """Write a place as a person would."""
        return spell(place)

    def mistakes(self, document: Mapping[str, object]) -> Iterator[tuple[Place, str]]:
        """Find what is wrong with names and values, one by one."""
        return self._table(self.root, document, ())

    def require_none(self, found: Found, lines: Mapping[Place, int], path: Path) -> None:
        """Raise ConfigError if there are mistakes."""
        told = [
            Mistake(line_of(lines, place), f"{self.spell(place)}: {words}" if place else words)
            for place, words in found
        ]
        if told:
            raise ConfigError(path, told)

    def _table(self, struct: type[Struct], table: Mapping[str, object], place: Place) -> Iterator[tuple[Place, str]]:
        settings = {each.encode_name: each for each in fields(struct)}
        for key in table:
            if key not in settings:
                words = self.elsewhere(place, key) or self._close_to(key, settings)
                yield (*place, key), f"there is no such {self.noun}; {words}"
        for name, setting in settings.items():
            if name in table:
                yield from self._value(setting.type, table[name], (*place, name))
            elif (setting.required or name == self.needed.get(struct)) and not self.may_miss((*place, name)):
                yield self.missing((*place, name), setting.type)

    def _close_to(self, key: str, known: Iterable[str]) -> str:
        close = closest(key, known)
        nearest = f"write {close!r} instead" if close else ""
        every = "" if close else f"{self.noun}s here are: {', '.join(known)}"
        return "; ".join(filter(None, (nearest, self.namesakes(key), every)))

    def _value(self, hint: object, value: object, place: Place) -> Iterator[tuple[Place, str]]:
        struct, origin, kinds = struct_of(hint), get_origin(hint), get_args(hint)
        if origin is tuple and struct_of(kinds[0]) is not None and isinstance(value, list):
            for index, element in enumerate(value):
                yield from self._value(kinds[0], element, (*place, index))
        elif origin is dict and isinstance(value, dict):
            for name, element in value.items():
                yield from self._named(kinds, name, element, (*place, name))
        elif struct is not None and isinstance(value, dict):
            yield from self._table(struct, value, place)
        elif not fits(value, hint):
            yield place, self._will_not_do(hint, value, place)
        else:
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and (found := CONTROL.search(text)):
                    yield place, f"holds the character U+{ord(found[0]):04X}, which {self.control}"

    def _named(self, kinds: tuple[object, ...], name: str, value: object, place: Place) -> Iterator[tuple[Place, str]]:
        if words := self.misplaced(place, value):
            yield place, words
            return
        if not fits(name, kinds[0]):
            yield place, self._will_not_do(kinds[0], name, place)
        yield from self._value(kinds[1], value, place)

    def _will_not_do(self, hint: object, value: object, place: Place) -> str:
        shown = "this value" if self.is_secret(place) else show(value)
        return f"{shown} will not do; write {self.instead(hint, value, place)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a name was probably meant for; None if none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def converted(value: object, kind: type[_T]) -> _T:
    """Convert a document, or a part of one. Raises msgspec.ValidationError."""
    # msgspec would take a text for a decimal, if decimals were not a type of the file.
    return msgspec.convert(value, kind, dec_hook=_path, builtin_types=(Decimal,))


def fits(value: object, hint: object) -> bool:
    """Whether a value is of a type, and within its bounds."""
    try:
        msgspec.convert(value, hint, dec_hook=_path, builtin_types=(Decimal,))
    except msgspec.ValidationError:
        return False
    return True


def _path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError("not a path")


def sections_of(struct: type[Struct], header: str = "") -> Iterator[tuple[str, type[Struct], list[FieldInfo]]]:
    """Yield the header of each section, its struct, and its settings that are no sections themselves."""
    own, inner = [], []
    for field in fields(struct):
        is_array = get_origin(field.type) is tuple
        section = struct_of(get_args(field.type)[0] if is_array else field.type)
        if section is None:
            own.append(field)
        else:
            name = f"{header.strip('[]')}.{field.name}".removeprefix(".")
            inner.append((section, f"[[{name}]]" if is_array else f"[{name}]"))
    yield header, struct, own
    for section, below in inner:
        yield from sections_of(section, below)


def struct_of(hint: object) -> type[Struct] | None:
    """Return the struct of a section, or of sections by name; None for other settings, and for arrays of sections."""
    candidates = [hint, *get_args(hint)] if get_origin(hint) is not tuple else [hint]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Struct):
            return candidate
    return None


def wanted(hint: object) -> str:
    """Say in words what a setting of this type takes."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        # A setting that may be left out is described without None.
        given = [each for each in get_args(hint) if each is not type(None)]
        hint = given[0] if len(given) == 1 else hint
    origin, arguments = get_origin(hint), get_args(hint)
    for candidate in (hint, *(arguments if origin not in (tuple, dict) else ())):
        for argument in getattr(candidate, "__metadata__", ()):
            if isinstance(argument, Meta) and argument.description:
                return argument.description
    if origin is Literal:
        return "one of " + ", ".join(show(argument) for argument in arguments)
    if origin is tuple:
        return 'a list of texts, such as ["...", "..."]'
    if struct_of(hint) is not None:
        return "a section in [brackets]"
    if origin is dict:
        of = arguments[1]
        return f"{wanted(of)}, by name" if get_origin(of) is Annotated else 'texts by name, such as "42" = "..."'
    return "true or false" if hint is bool else "a text in double quotes"
