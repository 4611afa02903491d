"""`sluice check`: which Kafka topics this gateway's readings go to, for whoever reads them in the cloud."""

import re

from gateway.commands.check.finding import Finding, well
from gateway.record_contract import USUAL_TOPICS
from gateway.settings import Settings

_VARIABLE = re.compile(r"\{[a-z][a-z0-9_]*\}")
_ANY = ".*"


def check_topics(settings: Settings) -> Finding:
    """Name the topics of readings, as `sluice-cloud ingest` does, and the pattern that fits them all."""
    kafka, subject = settings.kafka, "kafka.events_topic"
    templates = reading_topics(settings)
    pattern = topics_pattern((*templates, kafka.events_topic))
    goes = f"readings go to {', '.join(templates)}, and heartbeats on {kafka.events_topic} name these topics"
    if re.fullmatch(USUAL_TOPICS, kafka.events_topic):
        return well(
            subject,
            f"{goes}, so that `sluice-cloud ingest` reads them. Where it is given --topics, that must fit them, as "
            f"'{pattern}' does",
        )
    return well(
        subject,
        f"{goes}, where `sluice-cloud ingest` does not look unless it is told to: start it with --topics '{pattern}'",
    )


def reading_topics(settings: Settings) -> tuple[str, ...]:
    """The topics that readings go to, with variables where these depend on what sensors publish."""
    topics = dict.fromkeys(route.kafka for route in settings.routes)
    if settings.fallback_topic is not None:
        topics[settings.fallback_topic] = None
    backlog = settings.kafka.backlog_topic
    if backlog is not None:
        topics |= dict.fromkeys(backlog.replace("{topic}", topic) for topic in list(topics))
    return tuple(topics)


def topics_pattern(templates: tuple[str, ...]) -> str:
    """A regular expression of whole names that fits all that templates make."""
    patterns = (_ANY.join(part.replace(".", "[.]") for part in _VARIABLE.split(template)) for template in templates)
    return "|".join(dict.fromkeys(patterns))
