"""Which commits of a Delta table are forgotten in a copy that was made while the table was written. Without Spark."""

import json
import os
import time
from pathlib import Path

import pytest

from spark.engine.warehouse_folder import note_place, was_copied
from spark.ingest.warehouse_copy import forget_broken_commits


@pytest.mark.parametrize(
    ("commits", "there", "kept"),
    [
        # Each commit: hours before the last one, what it adds, what it takes out.
        ([(1, "a", ""), (0, "b", "")], "ab", 2),
        ([(2, "a", ""), (1, "b", ""), (0, "c", "")], "ac", 1),
        # Made one file of two, which a vacuum deleted.
        ([(2, "a", ""), (1, "b", ""), (0, "c", "ab")], "c", 3),
        # That one file was not copied yet: the two are needed.
        ([(2, "a", ""), (1, "b", ""), (0, "c", "ab")], "ab", 2),
        ([(3, "a", ""), (2, "b", ""), (1, "c", "ab"), (0, "d", "")], "ab", 2),
        # Lost, but not by the copying: all that came since would go.
        ([(50, "a", ""), (49, "b", ""), (1, "c", ""), (0, "d", "")], "acd", 4),
        ([(1, "a", ""), (0, "b", "")], "b", 2),
    ],
)
def test_only_what_the_copying_broke_is_forgotten(
    tmp_path: Path, commits: list[tuple[int, str, str]], there: str, kept: int
) -> None:
    notes = tmp_path / "_delta_log"
    notes.mkdir()
    for version, (hours_ago, added, removed) in enumerate(commits):
        actions: list[dict[str, object]] = [{"commitInfo": {"timestamp": 10**12 - hours_ago * 3_600_000}}]
        actions += [{"add": {"path": name, "size": 3}} for name in added]
        actions += [{"remove": {"path": name}} for name in removed]
        (notes / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))
    for name in there:
        (tmp_path / name).write_bytes(b"abc")
    forget_broken_commits(tmp_path)
    assert len(list(notes.iterdir())) == kept


def test_notes_with_a_hole_are_forgotten_from_there_on(tmp_path: Path) -> None:
    notes = tmp_path / "_delta_log"
    notes.mkdir()
    for version in (7, 8, 10, 11):
        (notes / f"{version:020}.json").write_text(json.dumps({"commitInfo": {"timestamp": 10**12}}))
    forget_broken_commits(tmp_path)
    assert sorted(int(file.stem) for file in notes.iterdir()) == [7, 8]


def test_a_warehouse_whose_files_were_put_back_in_its_place_is_seen(tmp_path: Path) -> None:
    newest = tmp_path / "v1" / "log" / "_delta_log" / f"{7:020}.json"
    newest.parent.mkdir(parents=True)
    newest.write_text("{}")
    assert was_copied(str(tmp_path))
    note_place(str(tmp_path))
    assert not was_copied(str(tmp_path))
    # As `rsync -a` puts them: their times are those of the backup, and what is the same already is left.
    for file, seconds_ago in ((newest, 3_600), (tmp_path / "_place", 60)):
        os.utime(file, (time.time() - seconds_ago,) * 2)
    assert was_copied(str(tmp_path))
    note_place(str(tmp_path))
    assert not was_copied(str(tmp_path))
