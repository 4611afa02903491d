"""Runs `sluice` as if a folder were a box of its own: `python -m demo.box FOLDER TRIAL_S fleet pull`.

So many gateways run on one machine, as root or not, by the code of real boxes. A real box differs: it has
other places of files, systemd in place of `demo.box_service`, keys of its own that it trusts, and longer trials.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from demo.box_service import ask
from gateway import settings

CONFIG = "gateway.toml"
REPORT_FOLDER = "fleet"
PUBLIC_KEY = "release.pem"
FED_S = 4.0
"""Seconds for which a daemon has to run to be well, in place of a minute."""
LOOK_S = 1.0
"""Seconds between two looks of the judge, and of the daemon at its own state, in place of two and of sixty."""
EFFORT_SHARE = 5
"""Least rest of the daemon after a look at its state, as a multiple of its effort, in place of 50."""


def main() -> None:
    """Be the box, and run the command."""
    folder, trial_s = Path(sys.argv[1]), float(sys.argv[2])
    del sys.argv[1:3]
    # Before the modules that take it over by its name.
    vars(settings).update(DEFAULT_CONFIG=folder / CONFIG)
    if sys.argv[1] == "fleet":
        _be_root(folder)
        _judge_within(trial_s)
    else:
        _tell_soon()
    _have_places(folder)
    from gateway.cli import main as sluice  # noqa: PLC0415 - as above

    sluice(prog_name="sluice")


def _have_places(folder: Path) -> None:
    from gateway.host import fleet_report, service  # noqa: PLC0415 - as above

    vars(fleet_report).update(FOLDER=folder / REPORT_FOLDER)
    vars(service).update(_systemctl=partial(ask, folder))


def _be_root(folder: Path) -> None:
    """Whoever runs this is the root of the box, and its only user."""
    from gateway.commands.fleet import box_now, look  # noqa: PLC0415 - as above

    vars(os).update(geteuid=lambda: 0)
    vars(box_now).update(as_service=lambda *_: nullcontext())
    vars(look).update(
        trusted_keys=lambda _: [folder / PUBLIC_KEY], KEY_FOLDERS=(folder,), why_others_could_change=lambda *_: None
    )


def _judge_within(trial_s: float) -> None:
    from gateway.commands.fleet import box_now, trial_steps  # noqa: PLC0415 - as above
    from gateway.commands.update import trial  # noqa: PLC0415 - as above

    vars(trial).update(FED_S=FED_S)
    vars(trial_steps).update(TRIAL_S=trial_s, LOOK_S=LOOK_S)
    vars(box_now).update(AWAY_S=trial_s, SETTLED_S=0.0, LOOK_S=LOOK_S)


def _tell_soon() -> None:
    from gateway.health import state_watch  # noqa: PLC0415 - as above

    vars(state_watch).update(LOOK_S=LOOK_S, EFFORT_SHARE=EFFORT_SHARE)


if __name__ == "__main__":
    main()
