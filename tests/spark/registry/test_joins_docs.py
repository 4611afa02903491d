"""The examples on the analysts' page of joins can be run as they stand there."""

import re
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.registry.registry_file import parse_registry
from spark.registry.registry_table import open_calibrations, open_devices
from tests.support.join_frames import NOON_US, SECOND_US, decimal, readings_frame, windows_frame
from tests.support.oracle_joins import Metric, Reading

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

PAGE = Path(__file__).parents[3] / "docs" / "registry.md"
THERMO: Metric = ("plant", "42", "device-thermo", "temperature")
HYGRO: Metric = ("plant", "7", "device-hygro", "humidity")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_pages_examples_run(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readings = [
        Reading(metric, NOON_US + (second - day * 86_400) * SECOND_US, 10 * day + second, decimal(20_000_000 - day))
        for metric in (THERMO, HYGRO)
        for day in range(5)
        for second in (1, 2, 70)
    ]
    (toml,) = blocks("toml")
    (tmp_path / "registry.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    warehouse = str(tmp_path / "warehouse")
    # The tables that the first block opens, in a warehouse that an ingest has filled.
    opening, *examples = blocks("python")
    names: dict[str, object] = {
        "spark": spark,
        "warehouse": warehouse,
        "readings": readings_frame(spark, readings),
        "windows": windows_frame(spark, readings).withColumn("late", F.lit(1)),
        "open_devices": open_devices,
        "open_calibrations": open_calibrations,
    }
    assert all(name in opening for name in names)

    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)  # noqa: S102 - the project's own page

    assert names["version"] == parse_registry(toml, PAGE).version
    shown = capsys.readouterr().out
    # 20 degrees by 1.002 and -0.25, in the hall of that day; a day with three readings.
    for text in ("19.790000000000", "hall-3", "|  3|"):
        assert text in shown
    anew = names["anew"]
    assert isinstance(anew, DataFrame)
    assert anew.count() == 20
