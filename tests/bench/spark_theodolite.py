"""Theodolite's benchmarks UC2 (downsampling) and UC4 (hierarchical aggregation) on these tables.

Theodolite is Henning and Hasselbring's benchmark of stream processing in services (Big Data Research 25, 2021,
doi:10.1016/j.bdr.2021.100209; https://www.theodolite.rocks, github.com/cau-se/theodolite). Its load: simulated power
meters, NUM_SENSORS of them, each of which sends one message (`identifier`, `timestamp`, `valueInW`) each PERIOD_MS =
1000 ms to Kafka, at a fixed rate whatever the system does (an open workload). UC2 computes count, sum, minimum,
maximum, mean and variance for each sensor and tumbling window, of one minute in its Kafka Streams version. UC4 has
NUM_NESTED_GROUPS levels of groups below one another with NUM_SENSORS children each, 4 in its published runs, and sums
all sensors of each group by window, given out each EMIT_PERIOD_MS = 5000 ms. What it tells is the highest load at which
the service level holds: the trend of the consumer's lag, by linear regression after a warm-up.

What is different here: values are not all 10 W, or a wrong sum would look right; identifier and timestamp are in the
record's key and headers; there are outages, of a whole group at once, whose readings come in late; a load holds
where the lag grows by less than a twentieth of it, for the published bound of 2,000 messages/s would hide small loads.
UC2 is `windows` itself. UC4 is a question to `windows`: joined with the hierarchy, summed by group.
"""

from collections.abc import Iterable
from fractions import Fraction

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from tests.bench.spark_ledger import Counted

METRIC = "valueInW"
CHILDREN = 4
LAG_GROWTH_MAX = 0.05
"""Greatest growth of the lag in messages a second, as a share of the load."""
REPORTS_MIN = 3
"""Batches after the warm-up that a trend is seen by."""

GroupSum = tuple[str, int, int, int]
"""Group, start of the window in microseconds since 1970, values, their sum in hundredths."""


def groups_of(sensor: int, levels: int) -> list[str]:
    """The groups that a sensor is in, the root first."""
    return [f"group_lvl_{level}_{sensor // CHILDREN ** (levels - level)}" for level in range(levels)]


def hierarchy(windows: DataFrame, levels: int) -> DataFrame:
    """One row for each sensor and group that it is in, in the session of `windows`."""
    sensors = windows.sparkSession.range(CHILDREN**levels)
    groups = [
        F.format_string(f"group_lvl_{level}_%d", F.expr(f"id div {CHILDREN ** (levels - level)}"))
        for level in range(levels)
    ]
    return sensors.select(F.format_string("d%06d", "id").alias("device"), F.explode(F.array(*groups)).alias("group"))


def group_sums(windows: DataFrame, levels: int) -> DataFrame:
    """UC4: the sum of each group by window."""
    return (
        windows.where(F.col("metric") == METRIC)
        .join(F.broadcast(hierarchy(windows, levels)), "device")
        .groupBy("group", "window_start")
        .agg(F.sum("n").alias("n"), F.sum("sum").alias("sum"))
    )


def collected(sums: DataFrame) -> set[GroupSum]:
    rows = sums.select("group", F.unix_micros("window_start"), "n", (F.col("sum") * 100).cast("bigint")).collect()
    return {tuple(row) for row in rows}


def plain_group_sums(rows: Iterable[Counted], levels: int) -> set[GroupSum]:
    """Sums of groups in plain Python, from the readings that the sensors sent."""
    sums: dict[tuple[str, int], tuple[int, int]] = {}
    for device, _, start_us, n, total in rows:
        for group in groups_of(int(device[1:]), levels):
            there = sums.get((group, start_us), (0, 0))
            sums[group, start_us] = (there[0] + n, there[1] + total)
    return {(group, start_us, *there) for (group, start_us), there in sums.items()}


def trend(points: Iterable[tuple[float, float]]) -> float:
    """The slope of the line that fits best by least squares: the growth of `y` for each unit of `x`."""
    exact = [(Fraction(x), Fraction(y)) for x, y in points]
    middle_x = sum(x for x, _ in exact) / len(exact)
    middle_y = sum(y for _, y in exact) / len(exact)
    spread = sum((x - middle_x) ** 2 for x, _ in exact)
    return float(sum((x - middle_x) * (y - middle_y) for x, y in exact) / spread)
