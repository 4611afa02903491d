"""Checks topic filters of MQTT 3.1.1 (section 4.7), and whether two of them overlap."""

from itertools import zip_longest

SHARED_PREFIX = "$share/"


def mistake(topic_filter: str) -> str | None:
    """Say why a gateway cannot subscribe to a filter, and what to write instead; None if it can."""
    if not topic_filter:
        return 'is empty; write a topic or a filter, such as "device/#"'
    if topic_filter.startswith((SHARED_PREFIX, "$queue/")):
        return (
            "is a shared subscription: the broker would deal the messages out to several sessions, which loses a "
            "device's order. A message that one gateway has stored but not acknowledged would go to another gateway, "
            f"which would store it again; write {_without_group(topic_filter)!r}, and give each gateway its own topics"
        )
    if len(topic_filter.encode()) > 65_535:
        return "has more than 65535 bytes; write a shorter one"
    levels = topic_filter.split("/")
    if any("#" in level for level in levels[:-1]) or ("#" in levels[-1] and levels[-1] != "#"):
        return "has a '#' that is not the whole last level; write it like \"device/#\""
    if any("+" in level and level != "+" for level in levels):
        return "has a '+' that is not a whole level; write it like \"device/+/thermo\""
    return None


def overlap(one: str, other: str) -> bool:
    """Whether some topic matches both filters. Neither may be malformed."""
    if one[:1] != other[:1] and "$" in (one[:1], other[:1]):
        return False  # wildcards at the beginning do not match topics that begin with $ [MQTT-4.7.2-1]
    for left, right in zip_longest(one.split("/"), other.split("/")):
        if "#" in (left, right):
            return True
        if left is None or right is None:
            # One filter is longer. Its next level is no '#', which would match too (section 4.7.1.2).
            return False
        if left != right and "+" not in (left, right):
            return False
    return True


def _without_group(topic_filter: str) -> str:
    parts = topic_filter.split("/", 2 if topic_filter.startswith(SHARED_PREFIX) else 1)
    return parts[-1] or "device/#"
