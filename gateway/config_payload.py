"""What is wrong with a route's `identity` and `time` although each is right: what they mean together, in words."""

from collections.abc import Iterator

from gateway.config_words import Place, show
from gateway.payload_time import SENML_CBOR, SENML_JSON
from gateway.settings import RouteSettings

_NO_TICK = (
    'is "tick", and without an identity nothing says which boot\'s tick it is; write identity = "json", "cbor" or '
    '"binary", whichever the payload carries'
)
_SENML_KIND = (
    f'is "senml", which comes as one of two content types; write content_type = "{SENML_JSON}" or "{SENML_CBOR}"'
)
_SENML_IDENTITY = (
    'is "senml", whose packs are lists and carry no boot and seq; leave identity out, or write time = "timestamp"'
)
_NO_JSON = {
    "cbor": 'write content_type = "application/cbor", or what else it is',
    "binary": 'what begins with a header of bytes is no JSON; write content_type = "application/octet-stream", or one '
    "of your own",
}


def payload_mistakes(route: RouteSettings, place: Place) -> Iterator[tuple[Place, str]]:
    """Every mistake, with its place in the file; `place` is that of the route."""
    if route.time == "tick" and route.identity == "none":
        yield (*place, "time"), _NO_TICK
    if route.time == "senml" and route.identity != "none":
        yield (*place, "time"), _SENML_IDENTITY
    elif route.time == "senml" and route.content_type not in {SENML_JSON, SENML_CBOR}:
        yield (*place, "time"), _SENML_KIND
    if route.identity in _NO_JSON and route.content_type == "application/json":
        said = f"is {show(route.identity)}, and the payload is sent on as application/json"
        yield (*place, "identity"), f"{said}: {_NO_JSON[route.identity]}"
