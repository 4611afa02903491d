"""Tells from the settings which Kafka topics routes can make, and which topics have only echoes of readings."""

import re
from typing import Final

from gateway.settings import Settings, topic_behind

VARIABLE: Final = re.compile(r"\{[a-z][a-z0-9_]*\}")


def can_make(template: str, topic: str) -> bool:
    """Whether a route's template can make a topic: its fixed parts, with at least a character for each variable.

    Each inner part is looked for where it first occurs, and nowhere else. So no name in the cluster makes the search
    slow. No name is missed, because all variables take the same characters: those of a topic.
    """
    first, *rest = VARIABLE.split(template)
    if not rest:
        return topic == template
    *inner, last = rest
    if not topic.startswith(first):
        return False
    at = len(first)
    for part in inner:
        found = topic.find(part, at + 1)
        if found == -1:
            return False
        at = found + len(part)
    return len(topic) - len(last) > at and topic.endswith(last)


def is_echo_topic(settings: Settings, topic: str) -> bool:
    """Whether a topic has only echoes: no route names it, and it is a further topic of readings.

    No reading's own topic has a name that `kafka.latest_topic` makes.
    """
    kafka = settings.kafka
    if topic == settings.fallback_topic or any(route.kafka == topic for route in settings.routes):
        return False
    behind = topic_behind(kafka.structured_topic, topic)
    echoed = (route.kafka for route in settings.routes if route.envelope == "both")
    return kafka.is_latest(topic) or (behind != "" and any(can_make(template, behind) for template in echoed))
