"""`sluice check` names the topics of readings, with a pattern that `sluice-cloud ingest` takes."""

import re

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from gateway.commands.check.topics import check_topics, reading_topics, topics_pattern
from gateway.intake.routes import Destination, compile_routes
from gateway.record_contract import USUAL_TOPICS
from gateway.settings import KafkaSettings, RouteSettings
from tests.gateway.commands.check.test_check import settings_of


def test_topics_of_readings_are_named_with_their_backlog() -> None:
    settings = settings_of("ex.{a}", "meters", fallback="strays", backlog="{topic}.backlog")
    assert reading_topics(settings) == (
        *("ex.{a}", "meters", "strays"),
        *("ex.{a}.backlog", "meters.backlog", "strays.backlog"),
    )
    told = check_topics(settings)
    assert (told.result, told.subject) == ("pass", "kafka.events_topic")
    assert "readings go to ex.{a}, meters, strays, ex.{a}.backlog," in told.words
    pattern = "ex[.].*|meters|strays|ex[.].*[.]backlog|meters[.]backlog|strays[.]backlog|gateway-events"
    assert f"'{pattern}'" in told.words


def test_it_is_told_where_the_cloud_does_not_look_for_heartbeats() -> None:
    settings = settings_of("meters")
    elsewhere = structs.replace(settings, kafka=structs.replace(settings.kafka, events_topic="site-events"))
    told = check_topics(elsewhere)
    assert told.result == "pass"
    assert "start it with --topics 'meters|site-events'" in told.words
    fitting = structs.replace(settings, kafka=structs.replace(settings.kafka, events_topic="device-events"))
    assert check_topics(fitting).result == "pass"


def test_the_usual_route_leads_where_the_cloud_looks() -> None:
    usual = structs.replace(settings_of(), routes=(RouteSettings("device/{device}/{stream}", "device-{stream}"),))
    assert topics_pattern((*reading_topics(usual), KafkaSettings(()).events_topic)) == USUAL_TOPICS


NAMES = st.text(st.sampled_from("ab.-"), min_size=1, max_size=6)


@given(st.sampled_from(["a-{a}", "{a}b", "a{a}-{b}", "ex.{a}.{device}", "{a}", "a.b"]), NAMES, NAMES)
def test_the_pattern_fits_whatever_a_route_makes(template: str, first: str, second: str) -> None:
    settings = settings_of(template, backlog="late.{topic}")
    made = compile_routes(settings.routes, None, frozenset()).resolve(f"d/{first}/{second}", None)
    # Not all that may be drawn is a topic's name.
    assume(isinstance(made, Destination))
    assert isinstance(made, Destination)
    pattern = re.compile(topics_pattern(reading_topics(settings)))
    assert pattern.fullmatch(made.kafka_topic)
    assert pattern.fullmatch(f"late.{made.kafka_topic}")
    if template == "a.b":
        assert not pattern.fullmatch("a-b")
