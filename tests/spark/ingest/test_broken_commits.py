"""Which commits are forgotten in a copy that was made while the tables were written. Without Spark."""

import json
import os
import time
from pathlib import Path

import pytest

from spark.engine.warehouse_folder import CopyError, note_place, was_copied
from spark.ingest.warehouse_copy import forget_absent_versions, forget_broken_commits
from spark.log.warehouse_version import Published


@pytest.mark.parametrize(
    ("commits", "there", "kept"),
    [
        # Each commit: hours before the last one, the files that it adds, the files that it removes.
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


def commit(table: Path, version: int, metadata: str = "") -> None:
    (table / "_delta_log").mkdir(parents=True, exist_ok=True)
    note = {"commitInfo": {"timestamp": 10**12, "userMetadata": metadata}}
    (table / "_delta_log" / f"{version:020}.json").write_text(json.dumps(note))


@pytest.mark.parametrize(
    ("published", "there", "kept"),
    [
        # Of each commit of `versions`: the version, and the last commit of its `log`. Of each folder: the same.
        ([(1, 0)], {1: 7}, 1),
        ([(1, 0), (2, 3)], {1: 7, 2: 3}, 2),
        ([(1, 0), (2, 3)], {1: 7, 2: 2}, 1),
        ([(1, 0), (2, 3)], {1: 7}, 1),
        # Upkeep removed the old ones.
        ([(1, 0), (2, 3), (3, 4)], {3: 9}, 3),
        # An earlier program noted nothing.
        ([None, (2, 3)], {1: 7, 2: 2}, 1),
        ([None], {1: 7}, 1),
        ([(1, 0)], {}, 0),
    ],
)
def test_readers_see_the_last_version_that_the_copy_holds_as_it_was_published(
    tmp_path: Path, published: list[tuple[int, int] | None], there: dict[int, int], kept: int
) -> None:
    for place, version in enumerate(published):
        metadata = "" if version is None else Published(version[0], {"log": version[1]}).to_json()
        commit(tmp_path / "versions", place, metadata)
    for number, last in there.items():
        for version_of_log in range(last + 1):
            commit(tmp_path / f"v{number}" / "log", version_of_log)
    forget_absent_versions(str(tmp_path))
    assert len(list(tmp_path.glob("versions/_delta_log/*"))) == kept


def test_a_copy_that_holds_no_version_whole_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for place in (0, 1):
        commit(tmp_path / "versions", place, Published(place + 1, {"log": 3}).to_json())
    commit(tmp_path / "v2" / "log", 0)
    with pytest.raises(CopyError, match="take another copy"):
        forget_absent_versions(str(tmp_path))
    assert len(list(tmp_path.glob("*/**/*.json"))) == 3


def test_a_warehouse_whose_files_were_put_back_in_its_place_is_seen(tmp_path: Path) -> None:
    newest = tmp_path / "v1" / "log" / "_delta_log" / f"{7:020}.json"
    newest.parent.mkdir(parents=True)
    newest.write_text("{}")
    assert was_copied(str(tmp_path))
    note_place(str(tmp_path))
    assert not was_copied(str(tmp_path))
    # As `rsync -a` puts them: their times are those of the backup, and unchanged files are left.
    for file, seconds_ago in ((newest, 3_600), (tmp_path / "_place", 60)):
        os.utime(file, (time.time() - seconds_ago,) * 2)
    assert was_copied(str(tmp_path))
    note_place(str(tmp_path))
    assert not was_copied(str(tmp_path))
