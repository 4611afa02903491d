"""The format that docs/formats.md tells a stranger to write is read by the gateway, and gives what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.formats.cutter import Cut
from gateway.serial_lines.format_process import running, why_not_loaded

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "formats.md").read_text()
FORMAT, TRIAL = re.findall(r"(?s)```python\n(.*?)```", PAGE)
(PRINTED,) = re.findall(r"(?s)```\n(Cut.*?)```", PAGE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rain.py").write_text(FORMAT)
    return tmp_path


def test_the_trial_of_the_page_prints_what_the_page_says(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRIAL],
        env={"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == PRINTED


@pytest.mark.skipif(os.geteuid() != 0, reason="a format's file must be root's")
async def test_the_format_of_the_page_runs_in_its_process(folder: Path) -> None:
    assert why_not_loaded("rain", folder) is None
    async with running("rain", folder) as process:
        assert await process.feed(bytes.fromhex("55 00 2a 7f")) == [Cut((b'{"tips": 42}',))]
