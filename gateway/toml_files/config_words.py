"""How mistakes of `gateway.toml` speak of a place in it, and show what stands there."""

import msgspec

Place = tuple[str | int, ...]
"""Where a setting stands: ('kafka', 'linger_ms'), ('routes', 0, 'topic')."""
_SHOWN_MAX = 300
"""Characters of a text that a message repeats: longer than Kafka's longest topic."""


def show(value: object) -> str:
    """A value in a message: on one line, short, and without what may be a password of an address."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "@" in value:
            return "a text with an @ (not shown, for it may hold a password)"
        # As JSON, so that no character of it acts on the terminal.
        return msgspec.json.encode(value if len(value) <= _SHOWN_MAX else value[:_SHOWN_MAX] + "...").decode()
    if isinstance(value, list):
        inner = ["a list" if isinstance(element, list) else show(element) for element in value[:3]]
        return f"[{', '.join(inner)}{', ...' if len(value) > len(inner) else ''}]"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of this size"
    return "a section" if isinstance(value, dict) else repr(value)
