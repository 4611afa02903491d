"""A series' columns in the file, and what becomes of its variables and its wish for events there."""

from msgspec.structs import replace

from gateway.buffer.rows import Series, StructuredEvents
from tests.support.buffers import entry

OF_ROUTE = replace(
    entry().series, content_type="application/json", variables=(("site", "B\u00fcro; 1\n"), ("device", "a:b"))
)

WITH_EVENTS = replace(OF_ROUTE, structured=StructuredEvents(beside=True, variables=OF_ROUTE.variables))


def test_to_an_older_program_variables_are_a_parameter_of_the_content_type() -> None:
    told = OF_ROUTE.columns[-1]
    assert told.partition(";")[0] == "application/json"
    assert Series.of_columns(OF_ROUTE.columns, OF_ROUTE.stream) == OF_ROUTE


def test_damaged_variables_are_none_and_cost_nothing_else() -> None:
    *columns, told = OF_ROUTE.columns
    found = Series.of_columns([*columns, told[:-2]], OF_ROUTE.stream)
    assert found == replace(OF_ROUTE, variables=())


def test_a_wish_for_events_is_kept_beside_the_variables() -> None:
    plain = replace(WITH_EVENTS, structured=StructuredEvents())
    for series in (WITH_EVENTS, replace(WITH_EVENTS, variables=()), plain):
        assert Series.of_columns(series.columns, series.stream) == series
        assert series.columns != replace(series, structured=None).columns


def test_a_damaged_wish_for_events_is_none_and_costs_nothing_else() -> None:
    *columns, told = WITH_EVENTS.columns
    assert Series.of_columns([*columns, told[:-1]], OF_ROUTE.stream) == replace(OF_ROUTE, variables=())
