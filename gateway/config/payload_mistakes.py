"""Finds mistakes in a route's `identity` and `time`, and in settings that belong to them, if each alone is right."""

from collections.abc import Iterator

from gateway.intake.payload_time import SENML_CBOR, SENML_JSON
from gateway.settings import RouteSettings
from gateway.toml_files.mistakes import Place, show

_NO_TICK = (
    'is "tick", and without an identity nothing says which boot\'s tick it is; write identity = "json", "cbor", '
    '"binary" or "properties", whichever the message carries'
)
_SENML_KIND = (
    f'is "senml", which comes as one of two content types; write content_type = "{SENML_JSON}" or "{SENML_CBOR}"'
)
_SENML_IDENTITY = (
    'is "senml", whose packs are lists and carry no boot and seq; leave identity out, or write identity = "properties" '
    'or time = "timestamp"'
)
_NO_JSON = {
    "cbor": 'write content_type = "application/cbor", or what else it is',
    "binary": 'what begins with a header of bytes is no JSON; write content_type = "application/octet-stream", or one '
    "of your own",
}
_OF_TICKS = ("oscillator", "least_delay_ms")
_DEFAULTS = RouteSettings("", "")
_WHICH_TIME = 'time = "senml", "timestamp" or "property", whichever the message carries'
_WHICH_IDENTITY = 'identity = "json", "cbor", "binary" or "properties", whichever the message carries'
_OF_FRAMES = {"oscillator": ". For sensors with our frames it is a setting of [serial]"}


def payload_mistakes(route: RouteSettings, place: Place) -> Iterator[tuple[Place, str]]:
    """Yield every mistake, with its place in the file; `place` is that of the route."""
    if route.time == "tick" and route.identity == "none":
        yield (*place, "time"), _NO_TICK
    if route.time == "senml" and route.identity not in {"none", "properties"}:
        yield (*place, "time"), _SENML_IDENTITY
    elif route.time == "senml" and route.content_type not in {SENML_JSON, SENML_CBOR}:
        yield (*place, "time"), _SENML_KIND
    if route.identity in _NO_JSON and route.content_type == "application/json":
        said = f"is {show(route.identity)}, and the payload is sent on as application/json"
        yield (*place, "identity"), f"{said}: {_NO_JSON[route.identity]}"
    yield from _idle_mistakes(route, place)


def _idle_mistakes(route: RouteSettings, place: Place) -> Iterator[tuple[Place, str]]:
    """Find settings that would do nothing, if they differ from their defaults."""
    written = {name for name in (*_OF_TICKS, "time_error_ms") if getattr(route, name) != getattr(_DEFAULTS, name)}
    if "time_error_ms" in written and route.time not in {"senml", "timestamp", "property"}:
        told = f"is of times that sensors send, and none is read here, for time is {show(route.time)}"
        yield (*place, "time_error_ms"), f"{told}; remove it, or write {_WHICH_TIME}"
    for name in _OF_TICKS:
        told = "is of sensors' clocks that are learnt by their ticks, and no tick is read here, for"
        if name in written and route.time not in {"auto", "tick"}:
            wanted = 'remove it, or write time = "auto"'
            yield (*place, name), f"{told} time is {show(route.time)}; {wanted}{_OF_FRAMES.get(name, '')}"
        elif name in written and route.identity == "none":
            wanted = f"remove it, or write {_WHICH_IDENTITY}"
            yield (*place, name), f'{told} identity is "none"; {wanted}{_OF_FRAMES.get(name, "")}'
