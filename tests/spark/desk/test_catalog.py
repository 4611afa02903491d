"""The catalog: what is declared beside what came, and where both disagree."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.cli import main
from spark.decode.streams_file import parse_streams
from tests.support.plain_warehouse import PlainWarehouse, row

DECLARED = """
unknown = "accept"
[streams.device-thermo]
codec = "json"
metrics.celsius = { unit = "°C", min = -40, max = 2 }
metrics.humidity = { unit = "%" }
[streams."meter-*"]
codec = "number"
"""


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two streams, one of which is declared; an undeclared number; a reject; and a stream that never came."""
    path = tmp_path_factory.mktemp("catalog")
    made = PlainWarehouse(path / "warehouse", parse_streams(DECLARED, Path("streams.toml")))
    made.take(
        row(1, -1),
        row(2, 0, "43", undeclared=["volts"]),
        row(3, 0, metrics=None, reject_reason="undecodable: the payload has no number"),
        # Its gateway does not know the time yet.
        row(5, 1, topic="device-clock", stream="device-clock", time_error_us=TIME_ERROR_UNKNOWN_US),
        row(4, 1, topic="device-power", stream="device-power", metrics=[{"name": "watts", "value": 7, "ago_us": None}]),
    )
    return str(made.path)


def shown(warehouse: str, *words: str) -> dict[tuple[str, str | None], dict[str, object]]:
    done = CliRunner().invoke(main, ["catalog", "--warehouse", warehouse, "--json", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["stream"], row["metric"]): row for row in rows}


def test_declarations_and_data_stand_side_by_side(warehouse: str) -> None:
    rows = shown(warehouse)
    celsius = rows["device-thermo", "celsius"]
    wanted = {
        "unit": "°C",
        "range": "-40 to 2",
        "count": 2,
        "devices": 2,
        "min": "1.000000",
        "max": "2.000000",
        "first_time": "2026-03-13T12:00:00.000000Z",
        "last_time": "2026-03-14T12:00:00.000000Z",
        "says": None,
    }
    assert {name: celsius[name] for name in wanted} == wanted
    assert {key: row["says"] for key, row in rows.items() if key[1] != "celsius"} == {
        ("device-power", "watts"): None,
        ("device-power", None): "not declared: read by its content type",
        ("device-thermo", "humidity"): "declared, and in no window",
        ("device-thermo", "volts"): "not declared: in 1 record, and its values are in no table",
        ("device-thermo", None): "1 reject: 1 undecodable",
        ("meter-*", None): "declared, and never seen: no topic of its name has a record",
        ("device-clock", None): "its readings are in no window",
    }


def test_other_declarations_can_be_tried(warehouse: str, tmp_path: Path) -> None:
    other = tmp_path / "streams.toml"
    other.write_text('[streams."device-*"]\ncodec = "json"\nmetrics.celsius = { max = 1 }\n')
    rows = shown(warehouse, "--streams", str(other))
    assert rows["device-thermo", "celsius"]["says"] == (
        "values are beyond the range: they came before the declaration of today"
    )
    assert rows["device-power", "watts"]["says"] == "not declared: it came before the declaration of today"
    assert rows["device-power", "celsius"]["says"] == "declared, and in no window"


def test_one_page_for_a_person(warehouse: str) -> None:
    done = CliRunner().invoke(main, ["catalog", "--warehouse", warehouse, "--stream", "device-thermo"])
    assert done.exit_code == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["device-thermo", "celsius"],
        ["device-thermo", "humidity"],
        ["device-thermo", "volts"],
        ["device-thermo", "-"],
    ]
