"""`sluice-cloud desk` as a process: what its addresses give, whom it refuses, and how it ends."""

import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import duckdb
import pytest

from spark.desk import tables
from tests.support.desk_scene import BOILER, HALL, MISSING, OVERFLOWN
from tests.support.desk_server import SLUICE_CLOUD, Desk, desk
from tests.support.waiting import patience, wait_until

pytestmark = pytest.mark.spark
OF_BOOT = " of boot 7-1a2b"
NOBODY_SAID = "Nobody has said why, so they may still come."
DAY = {"since": "2026-03-14", "until": "2026-03-15"}
GUIDE = Path(__file__).parents[3] / "docs" / "desk.md"


@pytest.fixture(scope="module")
def server(scene_warehouse: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk(scene_warehouse, tmp_path_factory.mktemp("desk")) as found:
        yield found


def printed(warehouse: str, *words: str) -> str:
    done = subprocess.run(
        [SLUICE_CLOUD, *words, "--warehouse", warehouse], capture_output=True, check=True, timeout=patience(60)
    )
    return done.stdout.decode()


def curve(server: Desk, **told: object) -> dict[str, Any]:
    answer = server.get("/curve.json", told)
    assert answer.status == 200, answer.text
    found: dict[str, Any] = json.loads(answer.body)
    return found


# -- rows for other programs -------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["readings", "windows", "gaps", "losses", "gateways"])
def test_csv_equals_the_commands(server: Desk, scene_warehouse: str, view: str) -> None:
    answer = server.get(f"/{view}.csv")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    # A terminal's lines end without a carriage return.
    assert answer.text.replace("\r\n", "\n") == printed(scene_warehouse, view, "--csv").replace("\r\n", "\n")


def test_json_reads_back_as_the_commands_rows(server: Desk, scene_warehouse: str) -> None:
    told = {"device": BOILER, "metric": "celsius", "size": 3600, **DAY}
    words = [
        "--device",
        BOILER,
        "--metric",
        "celsius",
        "--size",
        "3600",
        "--since",
        "2026-03-14",
        "--until",
        "2026-03-15",
    ]
    lines = printed(scene_warehouse, "windows", "--json", "--limit", "1000", *words).splitlines()
    assert json.loads(server.get("/windows.json", told).body) == [json.loads(line) for line in lines] != []


def test_parquet_reads_back_with_all_rows(server: Desk, scene_warehouse: str, tmp_path: Path) -> None:
    (tmp_path / "w.parquet").write_bytes(server.get("/windows.parquet", {"full": "1"}).body)
    read = duckdb.read_parquet(str(tmp_path / "w.parquet"))
    whole = tables.open(scene_warehouse).windows()
    order = "device, metric, window_start"
    assert (
        read.project(", ".join(f'"{name}"' for name in whole.columns)).order(order).fetchall()
        == whole.order(order).fetchall()
    )


def test_what_grafana_asks_is_answered_with_rows_in_order_of_time(server: Desk) -> None:
    """As its Infinity source asks for the panel in the guide: a bearer token, an unused variable left empty."""
    (told,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (panel,) = json.loads(told)["panels"]
    (target,) = panel["targets"]
    variables = {
        "${device}": HALL,
        "${metric}": "celsius",
        "${__from:date:iso}": "2026-03-14T12:00:00.000Z",
        "${__to:date:iso}": "2026-03-14T13:00:00.000Z",
    }
    url = urlsplit(target["url"])
    answer = server.get(
        url.path,
        {name: variables.get(value, value) for name, value in parse_qsl(url.query)} | {"site": ""},
        headers={"authorization": f"Bearer {server.token}", "accept": "text/csv", "user-agent": "Grafana"},
        with_token=False,
    )
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    starts = [row["window_start"] for row in rows]
    assert (answer.status, starts[0], len(rows)) == (200, "2026-03-14T12:00:00.000000Z", 50)
    assert starts == sorted(starts)
    numbers = [column["selector"] for column in target["columns"] if column["type"] == "number"]
    figures = [[float(row[name]) for name in numbers] for row in rows]
    assert all(lowest <= mean <= highest for mean, lowest, highest in figures)


@pytest.mark.parametrize(
    ("path", "told", "status", "words"),
    [
        ("/readings.csv", {"device": "boiler-4"}, 404, "there is no device 'boiler-4' here. Did you mean boiler-3?"),
        ("/windows.json", {"site": "nort"}, 404, "there is no site 'nort' here. Did you mean north?"),
        ("/windows.json", {"size": "7"}, 400, "windows of 7 s cannot be made from windows of 60 s"),
        ("/windows.json", {"devcie": "x"}, 400, "did you mean device?"),
        ("/window.csv", {}, 404, "there are readings, windows, gaps, losses, gateways"),
        ("/curve.json", {"device": BOILER, "last": "400d", "size": "60"}, 400, "choose longer ones"),
        ("/curve.json", {"device": BOILER, "since": "0900-01-01"}, 400, "choose a shorter span"),
        ("/curve.json", {"device": BOILER, "until": "0001-01-01"}, 400, "out of range"),
        ("/curve.json", {"device": BOILER, "until": "9999-12-31T23:59-01:00"}, 400, "out of range"),
        ("/explain.json", {"device": BOILER}, 400, "say which window"),
        ("/explain.json", {"device": BOILER, "at": "2026-03-14T12:05"}, 400, "has several such windows"),
    ],
)
def test_what_cannot_be_answered_is_told_in_words(
    server: Desk, path: str, told: dict[str, str], status: int, words: str
) -> None:
    answer = server.get(path, told)
    assert (answer.status, words in answer.text) == (status, True), answer.text


def test_a_span_without_rows_says_where_the_nearest_are(server: Desk) -> None:
    told = {"device": BOILER, "since": "2026-03-14T13:07:00", "until": "2026-03-14T13:09:00"}
    nearest = "the last before it is of 2026-03-14T13:06:20Z, the first after it is of 2026-03-14T13:10:40Z"
    note = f"nothing in this span: {nearest}"
    answer = server.get("/readings.csv", told)
    assert (answer.status, len(answer.text.splitlines()), answer.headers["sluice-note"]) == (200, 1, note)
    found = curve(server, **told)
    assert (found["points"], len(found["nearest_us"])) == ([], 2)
    assert found["nothing"].startswith("nothing in this span: the last before it is of 2026-03-14T13:06:00Z")


# -- the curve ---------------------------------------------------------------------------------------


def test_a_curve_has_the_commands_figures_and_all_that_is_known_of_them(server: Desk, scene_warehouse: str) -> None:
    found = curve(server, device=BOILER, metric="celsius")
    rows = tables.open(scene_warehouse).windows(device=BOILER, metric="celsius").order("window_start")
    shown = rows.project(
        "epoch_us(window_start), n, CAST(mean AS DOUBLE), CAST(min AS DOUBLE), CAST(max AS DOUBLE), "
        "deviation, status, why"
    )
    assert [tuple(point[:8]) for point in found["points"]] == shown.fetchall()
    statuses = {point[6] for point in found["points"]}
    assert statuses == {"complete", "complete_with_loss", "provisional"}
    assert [point[8] for point in found["points"] if point[8]] == [["late readings"]] * 2
    assert [series[2] for series in found["series"]] == ["bar", "celsius"]
    assert [(is_explained, words) for _, _, is_explained, words in found["missing"]] == [
        (True, f"Readings {OVERFLOWN[0]} to {OVERFLOWN[-1]}{OF_BOOT} are gone for good: sensor-ring-overflow."),
        (False, f"Readings {MISSING[0]} to {MISSING[-1]}{OF_BOOT} are missing. {NOBODY_SAID}"),
    ]


def test_losses_without_numbers_stand_beside_the_curve(server: Desk) -> None:
    assert [words for *_, words in curve(server, device=HALL)["missing"]] == ["30 readings were lost: buffer-full."]


def test_without_a_device_the_site_chooses_one(server: Desk) -> None:
    assert curve(server, site="south")["device"] == HALL
    told = json.loads(server.get("/choices.json", {"site": "south"}).body)
    assert (told["sites"], told["devices"]) == (["north", "south"], [HALL])


@pytest.mark.parametrize("size_s", [60, 1800])
@pytest.mark.parametrize(
    "told",
    # The last span begins and ends within a window.
    [{}, {"site": "north"}, {"since": "2026-03-14T12:10:30", "until": "2026-03-14T13:25:30"}],
    ids=["all", "of a site", "of a span"],
)
def test_the_sql_that_is_shown_gives_the_same_rows(
    server: Desk, scene_warehouse: str, size_s: int, told: dict[str, str]
) -> None:
    found = curve(server, device=BOILER, metric="celsius", size=size_s, **told)
    opened = tables.open(scene_warehouse)
    rows = opened.sql(found["sql"]["windows"]).project("n, CAST(mean AS DOUBLE)").fetchall()
    assert [count for count, _ in rows] == [point[1] for point in found["points"]]
    assert [mean for _, mean in rows] == pytest.approx([point[2] for point in found["points"]], abs=1e-6)
    assert len(opened.sql(found["sql"]["readings"]).fetchall()) == sum(count for count, _ in rows)
    assert len(opened.sql(found["sql"]["gaps"]).fetchall()) == len(found["missing"])


def test_a_window_is_explained(server: Desk) -> None:
    told = {"device": BOILER, "metric": "celsius", "at": "2026-03-14T12:50:10"}
    found = json.loads(server.get("/explain.json", told).body)
    assert (found["figures"]["status"], found["readings_count"]) == ("complete", 3)
    assert [each["device_sequence"] for each in found["readings"]] == [150, 151, 152]
    assert [each["gateway"] for each in found["gateways"]] == ["gw-1"]


# -- whom it refuses, and what it leaves alone ---------------------------------------------------------


def test_without_the_token_nothing_is_shown(server: Desk) -> None:
    for path in ("/", "/windows.csv", "/curve.json", "/desk.js"):
        answer = server.get(path, with_token=False)
        assert (answer.status, "sluice-cloud desk" in answer.text, BOILER in answer.text) == (401, True, False)
    assert server.get("/windows.csv", {"token": "x" * 32}, with_token=False).status == 401


def test_a_foreign_host_is_refused_even_with_the_token(server: Desk) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", ""):
        assert server.get("/windows.csv", headers={"Host": host}).status == 421
    assert server.get("/gateways.csv", headers={"Host": f"localhost:{server.port}"}).status == 200


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: Desk) -> None:
    answer = server.get("/", {"device": BOILER})
    assert (answer.status, answer.headers["location"]) == (303, f"/?device={BOILER}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = server.get("/", headers={"cookie": cookie.partition(";")[0]}, with_token=False)
    assert (page.status, "default-src 'none'" in page.headers["content-security-policy"]) == (200, True)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_but_reading_is_there(server: Desk, method: str) -> None:
    assert server.get("/windows.csv", method=method).status == 405


def test_nothing_is_written_and_nothing_left_behind(scene_warehouse: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(scene_warehouse).rglob("*")}
    folder = tmp_path / "home"
    folder.mkdir()
    with desk(scene_warehouse, folder) as server:
        for path in ("/readings.csv", "/windows.parquet", "/gaps.json", "/curve.json"):
            assert server.get(path).status == 200
        assert server.stop()[0] == 0
    assert {path: path.stat().st_mtime_ns for path in Path(scene_warehouse).rglob("*")} == before
    assert not any(folder.iterdir())


# -- many at a time, new commits, and the end ----------------------------------------------------------


def test_requests_in_parallel_get_the_answers_that_each_asked_for(server: Desk) -> None:
    paths = [("/windows.csv", {"device": name}) for name in (BOILER, HALL)] + [
        ("/readings.csv", {}),
        ("/gaps.json", {}),
    ]
    alone = [server.get(path, told).body for path, told in paths]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda each: server.get(*each).body, paths * 6))
    assert found == alone * 6


def test_a_new_commit_is_seen_and_what_did_not_change_is_kept(scene_warehouse: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(scene_warehouse, tmp_path / "warehouse"))
    (tmp_path / "home").mkdir()
    with desk(str(path), tmp_path / "home") as server:
        assert len(curve(server, device=BOILER)["missing"]) == 2
        forget_losses(path / "v1" / "losses")
        assert [is_explained for _, _, is_explained, _ in curve(server, device=BOILER)["missing"]] == [False, False]


def forget_losses(table: Path) -> None:
    """Commit that the table has no files any more."""
    log = table / "_delta_log"
    commits = sorted(log.glob("*.json"))
    added = [
        json.loads(line)["add"]["path"] for each in commits for line in each.read_text().splitlines() if '"add"' in line
    ]
    removed = [{"remove": {"path": name, "dataChange": True, "deletionTimestamp": 0}} for name in added]
    following = log / f"{int(commits[-1].stem) + 1:020}.json"
    following.write_text("".join(f"{json.dumps(each)}\n" for each in removed))


def test_a_browser_that_goes_away_holds_up_nobody_and_ctrl_c_ends_it_clean(
    scene_warehouse: str, tmp_path: Path
) -> None:
    with desk(scene_warehouse, tmp_path) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                request = f"GET /readings.csv?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
                client.sendall(request.encode())
        assert server.get("/gateways.csv").status == 200
        kept_open = socket.create_connection(("127.0.0.1", server.port))
        begun = time.monotonic()
        code, said = server.stop()
        kept_open.close()
    assert (code, "Traceback" in said) == (0, False), said
    assert time.monotonic() - begun < patience(10)


def test_a_port_that_is_taken_is_told_in_words(server: Desk, scene_warehouse: str) -> None:
    words = [SLUICE_CLOUD, "desk", "--warehouse", scene_warehouse, "--no-browser", "--port", str(server.port)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=patience(60))
    assert done.returncode == 2
    assert "leave --port out for a free one" in " ".join(done.stderr.split())


def test_a_token_can_be_kept_for_programs_that_ask_again(scene_warehouse: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    tokens = []
    for _ in range(2):
        with desk(scene_warehouse, tmp_path, "--token-file", str(file)) as server:
            tokens.append(server.token)
    assert tokens == [file.read_text().strip()] * 2
    assert file.stat().st_mode & 0o777 == 0o600
    for wrong in (b"short\n", b"\xff" * 32):
        file.write_bytes(wrong)
        words = [SLUICE_CLOUD, "desk", "--warehouse", scene_warehouse, "--no-browser", "--token-file", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=patience(60))
        assert (done.returncode, "holds no token" in done.stderr) == (3, True)


def test_the_browser_is_opened_with_the_token(scene_warehouse: str, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o700)
    process = subprocess.Popen(
        [SLUICE_CLOUD, "desk", "--warehouse", scene_warehouse],
        env={**os.environ, "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        wait_until(lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text().strip() == address)
    finally:
        process.terminate()
        process.communicate()
