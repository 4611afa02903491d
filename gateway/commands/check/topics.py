"""Names the Kafka topics that this gateway's readings go to, for whoever reads them in the cloud."""

import re

from gateway.commands.check.finding import Finding, well
from gateway.intake.route_topics import VARIABLE
from gateway.record_contract import USUAL_TOPICS
from gateway.settings import Settings

_ANY = ".*"


def check_topics(settings: Settings) -> Finding:
    """Name the topics of readings, and the pattern for `sluice-cloud ingest` that fits them all."""
    kafka, subject = settings.kafka, "kafka.events_topic"
    templates = reading_topics(settings)
    pattern = topics_pattern((*templates, kafka.events_topic))
    goes = f"readings go to {', '.join(templates)}, and heartbeats on {kafka.events_topic} name these topics"
    if re.fullmatch(USUAL_TOPICS, kafka.events_topic):
        return well(
            subject,
            f"{goes}, so `sluice-cloud ingest` reads them. If you start it with --topics, the pattern must fit them, "
            f"as '{pattern}' does",
        )
    return well(
        subject,
        f"{goes}, where `sluice-cloud ingest` does not look by itself: start it with --topics '{pattern}'",
    )


def reading_topics(settings: Settings) -> tuple[str, ...]:
    """Topics that readings go to. A topic that depends on what sensors publish has variables."""
    topics = dict.fromkeys(route.kafka for route in settings.routes)
    if settings.fallback_topic is not None:
        topics[settings.fallback_topic] = None
    backlog = settings.kafka.backlog_topic
    if backlog is not None:
        topics |= dict.fromkeys(backlog.replace("{topic}", topic) for topic in list(topics))
    return tuple(topics)


def topics_pattern(templates: tuple[str, ...]) -> str:
    """Regular expression that fits each whole name that the templates can make."""
    patterns = (_ANY.join(part.replace(".", "[.]") for part in VARIABLE.split(template)) for template in templates)
    return "|".join(dict.fromkeys(patterns))
