"""What is kept between questions: evidence of the version and the tables that a question sees, read in its order."""

from pathlib import Path

from deltalake import write_deltalake

from spark.desk import tables
from spark.desk.delta_source import Source
from spark.desk.kept_tables import KeptWarehouse
from spark.page.curve import curve
from spark.page.questions import question
from tests.support.plain_warehouse import PlainWarehouse, row

HISTORY = {
    **dict.fromkeys(("namespace", "device", "stream", "metric", "cause"), "VARCHAR"),
    "window_start": "TIMESTAMPTZ",
}


def warehouse_at(path: Path) -> PlainWarehouse:
    made = PlainWarehouse(path)
    made.take(row(1, 0))
    source = Source()
    write_deltalake(path / "window_changes", source.db.sql(source.values(HISTORY, [])))
    return made


def test_a_question_gets_no_evidence_of_a_former_version(tmp_path: Path) -> None:
    made = warehouse_at(tmp_path)
    kept = KeptWarehouse(tables.open(tmp_path))
    with kept.question() as former:
        former.version()
        assert former.evidence("42").heard
    made.begin_version()
    with kept.question() as later:
        # Nothing was heard yet in this version.
        assert not later.evidence("42").heard


def test_kept_evidence_opens_tables_in_the_order_in_which_it_is_read(tmp_path: Path) -> None:
    """Else windows may be older than evidence that is read anew, and count as final without their last readings."""
    warehouse_at(tmp_path)
    kept = KeptWarehouse(tables.open(tmp_path))
    opened = []
    for _ in range(2):
        with kept.question() as asked:
            asked.evidence("42")
            opened.append([*asked.source.seen])
    assert opened[0] == opened[1]


def test_a_curve_reads_evidence_first_also_if_it_looks_for_the_device(tmp_path: Path) -> None:
    warehouse_at(tmp_path)
    opened = []
    for told in ({"device": "42"}, {}):
        with KeptWarehouse(tables.open(tmp_path)).question() as asked:
            assert len(curve(asked, question(told)).points) == 1
            opened.append([*asked.source.seen])
    assert opened[0] == opened[1]
