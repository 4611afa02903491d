"""A question sees one version of the warehouse, whatever is published while it is answered."""

from pathlib import Path

import duckdb
from deltalake import write_deltalake

from spark.desk.tables import Tables


def publish(warehouse: Path, number: int) -> None:
    """Let readers see another version, whose registry has one device more."""
    with duckdb.connect() as db:
        devices = db.sql(f"SELECT 'plant' AS namespace, range::VARCHAR AS device, 'north' AS site FROM range({number})")
        write_deltalake((warehouse / "devices").as_uri(), devices, mode="overwrite")
        row = db.sql(f"SELECT {number}::INTEGER AS number, now() AS at, NULL::VARCHAR AS streams")
        write_deltalake((warehouse / "versions").as_uri(), row, mode="append")


def test_a_question_sees_one_version_until_the_next_one_is_asked(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    tables = Tables(str(tmp_path))

    def seen() -> tuple[str, int]:
        return tables.version()[0][-2:], len(tables.source.rows(tables.select("devices")))

    found = [seen()]
    publish(tmp_path, 2)
    found.append(seen())
    tables.renew()
    found.append(seen())
    assert found == [("v1", 1), ("v1", 1), ("v2", 2)]
    publish(tmp_path, 3)
    assert (len(tables.relation("devices").fetchall()), seen()) == (3, ("v3", 3))
