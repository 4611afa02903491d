"""`sluice fleet pull`: takes in what is for this box, goes back by itself, and changes nothing else, whatever comes."""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from gateway.clock.floor import RELEASED_US
from gateway.clock.gateway_clock import WallClock
from gateway.commands import certificate_dates
from gateway.commands.fleet import box_now, look
from gateway.commands.fleet.box_now import AWAY_S
from gateway.commands.update import download
from gateway.commands.update.image_update import Bundle
from gateway.commands.update.programs import UpdateError
from gateway.commands.update.stick_update import SETTLED_S
from gateway.commands.update.trial import FED_S, TRIAL_S, Seen
from gateway.config import config_file
from gateway.host import fleet_report, last_update, our_image, service
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import COMPATIBLE, OurImage
from gateway.host.service import ServiceError
from gateway.tls.dates import TrueTime
from systemd import deb_signing
from tests.support.certificates import make_authority
from tests.support.fleet_box import WELL, FleetBox, FleetFolder
from tests.support.https_site import https_site

if TYPE_CHECKING:
    from click.testing import Result

LINGER = "[groups.settings.kafka]\nlinger_ms = 100"
UPDATE = LastUpdate("1", "1.1.0", "1.2.0", "b", Before())


def told(box: FleetBox) -> tuple[str, str]:
    return box.report.result, box.report.trouble


def test_settings_are_changed_and_found_good(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    before = box.text
    shown = box.pull()
    assert shown.exit_code == 0, shown.output
    assert "this box has what fleet.toml wants" in shown.output
    assert box.text == before.replace("linger_ms = 50", "linger_ms = 100"), "notes and order stay"
    assert config_file.load(box.config).kafka.linger_ms == 100
    assert (box.running, box.restarts) == (box.text, 1)
    assert (box.config.stat().st_mode & 0o777, box.report.serial) == (0o640, 1)
    assert box.pull().exit_code == 0
    assert box.restarts == 1, "it has them already"
    assert list((fleet_report.FOLDER / "work").iterdir()) == []


def test_settings_that_are_not_good_are_taken_back_and_not_tried_again(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    before = box.text
    box.judged = lambda settings: WELL if "linger_ms = 50" in settings else replace(WELL, kafka=False)
    shown = box.pull()
    assert shown.exit_code == 1
    assert told(box) == ("went-back", "")
    assert box.report.reason == "within 5 min Kafka is not reached, and was before"
    assert (box.text, box.running, box.restarts) == (before, before, 2)
    assert TRIAL_S < box.now_s < 2 * TRIAL_S
    folder.publish(LINGER, serial=2)
    box.pull()
    assert (told(box), box.restarts, box.report.serial) == (("went-back", ""), 2, 2)
    assert box.report.reason == "within 5 min Kafka is not reached, and was before", "the reason is told still"
    box.judged = lambda _: WELL
    folder.publish(LINGER, serial=3, more="attempt = 2")
    box.pull()
    assert (told(box), box.restarts) == (("good", ""), 3)


def test_a_box_whose_service_was_off_does_not_wait_for_it(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    box.before = Before
    box.judged = lambda _: Seen()
    box.pull()
    assert (told(box), box.now_s < SETTLED_S + TRIAL_S) == (("good", ""), True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("[groups.settings.kafka.tls]\ncertificate = 'x.pem'", "has one of certificate and key"),
        ("[groups.settings.kafka]\nlinger = 100", "this version does not take the settings: kafka.linger: there is no"),
        ("[groups.settings.commands]\ntopic = 'a-{gateway}'\ndevices = []", "no device could be commanded"),
    ],
)
def test_settings_that_do_not_go_together_here_are_refused(
    box: FleetBox, folder: FleetFolder, change: str, words: str
) -> None:
    folder.publish(change)
    before = box.text
    assert box.pull().exit_code == 1
    assert told(box) == ("refused", "")
    assert words in box.report.reason
    assert (box.text, box.restarts) == (before, 0)


def test_a_password_of_the_box_itself_is_not_removed(box: FleetBox, folder: FleetFolder) -> None:
    broker = '[[mqtt_brokers]]\nhost = "a"\ntopics = ["a"]\n'
    box.config.write_text(f'{box.text}\n{broker}user = "u"\npassword = "secret"\n')
    folder.publish('[[groups.settings.mqtt_brokers]]\nhost = "b"\ntopics = ["a"]')
    before = box.text
    assert box.pull().exit_code == 1
    assert (told(box), box.text) == (("refused", ""), before)
    assert "password_file" in box.report.reason
    assert "secret" not in box.report.reason


def test_settings_behind_a_link_are_left_alone(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    its, before = box.config.with_name("mine.toml"), box.text
    box.config.rename(its)
    box.config.symlink_to(its)
    assert box.pull().exit_code == 1
    assert (told(box), box.config.is_symlink(), box.text) == (("refused", ""), True, before)
    assert box.report.reason.endswith(
        "is a link, and a change would put a file in its place: put the file itself there"
    )


def test_a_box_that_no_group_names_changes_nothing(box: FleetBox, folder: FleetFolder) -> None:
    folder.put("fleet.toml", f'serial = 4\n[[groups]]\nname = "a"\ngateways = ["south/*"]\n{LINGER}\n'.encode())
    assert box.pull().exit_code == 0
    assert (told(box), box.report.serial, box.restarts) == (("none", ""), 4, 0)


def test_a_box_waits_until_its_share_is_drawn(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER, 1, "share = 0")
    assert box.pull().exit_code == 0
    assert (told(box), box.restarts) == (("waits", ""), 0)
    assert "not among the first 0 per cent" in box.report.reason
    folder.publish(LINGER, 2)
    box.pull()
    assert (told(box), box.restarts) == (("good", ""), 1)


def test_a_box_waits_for_its_hours_and_for_a_clock(
    box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish(LINGER, 1, 'hours = "00:00-00:00"')
    with monkeypatch.context() as unsynced:
        unsynced.setattr(look, "read_wall_clock", lambda _gateway: WallClock(0, None))
        box.pull()
    assert box.report.reason == "fleet.toml has hours for it (00:00-00:00 UTC), and this box's clock is not synced"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(look, "is_within", lambda hours, _moment: hours != "00:00-00:00")
        box.pull()
    assert (told(box), box.restarts) == (("waits", ""), 0)
    box.pull()
    assert told(box) == ("good", "")


def test_a_change_has_to_reach_what_there_mostly_is(box: FleetBox, folder: FleetFolder) -> None:
    """Kafka is away at the first moment, and the service at the next one. Settings that lose Kafka are not good."""
    folder.publish(LINGER)
    box.judged = lambda settings: replace(WELL, kafka="linger_ms = 50" in settings)
    seen = iter([Before(readings=True, service=True), Before(readings=True, kafka=True)])
    box.before = lambda: next(seen)
    box.pull()
    assert (told(box), "linger_ms = 50" in box.text) == (("went-back", ""), True)


def test_a_service_has_to_run_although_its_user_kept_the_box_from_being_asked(
    box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That user's socket drips, and the new settings stop the service. Root opens nothing of that user itself."""
    folder.publish(LINGER)
    before = box.text

    def opened(_buffer: Path) -> None:
        raise AssertionError

    monkeypatch.setattr(certificate_dates, "known_floor", opened)
    monkeypatch.setattr(box_now, "asked", lambda *_: None)
    monkeypatch.setattr(service, "fed_s", lambda: ("linger_ms = 50" in box.running, FED_S))
    box.pull()
    assert (told(box), box.text) == (("went-back", ""), before)
    assert box.report.reason == "within 5 min its service does not run"


@pytest.mark.parametrize("up_s", [0, 10_000])
def test_a_box_that_never_reaches_kafka_is_changed_after_some_minutes(
    box: FleetBox, folder: FleetFolder, up_s: float
) -> None:
    folder.publish(LINGER)
    box.before = lambda: Before(service=True, readings=True)
    box.judged = lambda _: replace(WELL, kafka=False)
    box.now_s = up_s
    box.pull()
    assert told(box) == ("good", "")
    waited_s = box.now_s - up_s
    assert AWAY_S < waited_s < SETTLED_S if up_s else SETTLED_S < waited_s < SETTLED_S + AWAY_S


def test_settings_changed_by_hand_while_the_box_is_looked_at_stay(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)

    def looked_at() -> Before:
        box.config.write_text(box.text.replace('["kafka.example:9092"]', '["other.example:9092"]'))
        return Before(service=True, readings=True, kafka=True)

    box.before = looked_at
    box.pull()
    assert told(box) == ("good", "")
    assert "other.example" in box.text
    assert "linger_ms = 100" in box.text


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "does-nothing"])
def test_a_service_that_is_not_restarted_is_not_judged(
    box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    folder.publish(LINGER)
    before, restart = box.text, box.restart

    def restarted() -> None:
        if "linger_ms = 50" in box.text:
            restart()
        elif fails:
            raise ServiceError("systemctl try-restart sluice.service failed: it timed out")

    monkeypatch.setattr(service, "restart", restarted)
    assert box.pull().exit_code == 1
    assert (told(box), box.text, box.running) == (("went-back", ""), before, before)
    assert ("timed out" if fails else "was not restarted") in box.report.reason


# -- a folder that is not as it should be --------------------------------------------------------------


def refused(box: FleetBox) -> str:
    """A look that changes nothing, and tells why."""
    before, restarts, report = box.text, box.restarts, fleet_report.read()
    shown = box.pull()
    assert shown.exit_code == 1
    assert (box.text, box.restarts, box.now_s) == (before, restarts, 0)
    assert "nothing was taken in now" in shown.output
    assert replace(box.report, trouble="") == replace(report or fleet_report.FleetReport(), trouble="")
    return box.report.trouble


def test_a_dead_or_empty_folder_changes_nothing_and_is_told(box: FleetBox, folder: FleetFolder) -> None:
    assert "the server answers 404" in refused(box)
    folder.site.files["/fleet/fleet.toml"] = b"serial = 1\n"
    assert "fleet.toml.sig: the server answers 404" in refused(box)
    box.config.write_text(box.text.replace(str(folder.site.port), "1"))
    assert "127.0.0.1" in refused(box)


def test_an_old_file_that_comes_again_changes_nothing(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER, serial=2)
    box.pull()
    folder.publish(LINGER.replace("100", "10"), serial=1)
    assert "it is an old file" in refused(box)
    folder.publish(LINGER.replace("100", "10"), serial=2)
    assert "has the same serial number 2" in refused(box)
    folder.publish(LINGER.replace("100", "10"), serial=3)
    box.pull()
    assert (told(box), "linger_ms = 10\n" in box.text) == (("good", ""), True)


def test_a_file_of_somebody_else_changes_nothing(box: FleetBox, folder: FleetFolder, tmp_path: Path) -> None:
    folder.publish(LINGER)
    name = "/fleet/fleet.toml"
    content = folder.site.files[name]
    other = tmp_path / "other/key"
    deb_signing.make_key(other)
    for signature in (folder.signature(content, other), os.urandom(64), b"", bytes(64)):
        folder.site.files[f"{name}.sig"] = signature
        assert "fleet.toml is not trusted" in refused(box)
    folder.put("fleet.toml", content)
    folder.site.files[name] = content.replace(b"100", b"101")
    assert "its signature fits none of the keys" in refused(box)


def test_a_signed_file_with_mistakes_changes_nothing(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish("[groups.settings.gateway]\nid = 'x'", serial=9)
    assert "line 7: groups[0].settings.gateway.id: is each box's own name" in refused(box)
    assert box.report.serial == 0


def test_a_file_that_is_too_large_is_not_read(box: FleetBox, folder: FleetFolder) -> None:
    folder.put("fleet.toml", b"serial = 1\n" + b"#" * 1_000_000)
    assert "has 1.0 MB" in refused(box)


def test_without_its_section_a_box_looks_at_nothing(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    box.config.write_text(box.text.partition("[fleet]")[0])
    shown = box.pull()
    assert (shown.exit_code, folder.site.asked, fleet_report.read()) == (0, [], None)
    assert "no section [fleet]" in shown.output


def test_only_root_may_look(box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    shown = box.pull()
    assert (shown.exit_code, folder.site.asked) == (1, [])
    assert "only root" in shown.output


# -- somebody at the box -------------------------------------------------------------------------------


def test_settings_changed_by_hand_during_a_trial_stay(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)

    def judged(settings: str) -> Seen:
        if box.now_s > 10:
            box.config.write_text(settings.replace("linger_ms = 100", "linger_ms = 7"))
        return replace(WELL, kafka=False)

    box.judged = judged
    assert box.pull().exit_code == 1
    assert told(box) == ("went-back", "")
    assert "was changed by hand meanwhile" in box.report.reason
    assert "linger_ms = 7" in box.text
    box.judged = lambda _: WELL
    box.pull()
    assert "linger_ms = 7" in box.text, "nobody works against a person"


def test_former_settings_that_somebody_puts_back_during_a_trial_stay(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    before = box.text

    def judged(_settings: str) -> Seen:
        box.config.write_text(before)
        return WELL

    box.judged = judged
    assert box.pull().exit_code == 1
    assert (told(box), "was changed by hand" in box.report.reason) == (("went-back", ""), True)
    box.pull()
    assert (box.text, box.restarts) == (before, 1)


def test_a_second_look_waits_for_the_first_one(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    shown: list[Result] = []

    def judged(_settings: str) -> Seen:
        if not shown:
            shown.append(box.pull())
        return WELL

    box.judged = judged
    assert box.pull().exit_code == 0
    assert shown[0].exit_code == 1
    assert "another `sluice fleet pull` runs now" in " ".join(shown[0].output.split())


# -- certificates, clocks and images -------------------------------------------------------------------


def test_a_certificate_that_has_surely_ended_changes_nothing(
    box: FleetBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the clock is not synced, the floor judges: others pass, and the file's signature holds in any case."""
    box.config.write_text(box.text.replace('clock = "system"\n', ""))
    monkeypatch.setattr(look, "certificate_dates", lambda *_: lambda: TrueTime(RELEASED_US, None))
    authority = make_authority(tmp_path / "ca")
    year = timedelta(days=365)
    release = datetime.fromtimestamp(RELEASED_US / 1e6, UTC) - datetime.now(UTC)
    for name, begin, is_taken in (("past", release - 2 * year, False), ("later", release + year, True)):
        with https_site(authority.sign(name, valid=(begin, begin + year))) as site:
            (tmp_path / name).mkdir()
            its = FleetFolder(site, authority.certificate, tmp_path / name)
            monkeypatch.setattr(look, "KEY_FOLDERS", (its.keys,))
            its.publish(LINGER)
            text = re.sub(r"https://[^\"]*", its.url, box.text)
            box.config.write_text(re.sub("ca = .*", f'ca = "{authority.certificate}"', text))
            if is_taken:
                box.pull()
                assert told(box) == ("good", "")
            else:
                assert "the certificate of 127.0.0.1" in refused(box)


@pytest.fixture
def bundles(folder: FleetFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A box with our image of version 1.1.0, and the bundles that it has written."""
    written: list[bytes] = []
    monkeypatch.setattr(our_image, "read", lambda: OurImage("1.1.0", "a", {}))
    monkeypatch.setattr(last_update, "FILE", tmp_path / "last.json")
    monkeypatch.setattr(look, "ready_image", lambda: None)
    monkeypatch.setattr(look, "read_bundle", lambda file: Bundle(COMPATIBLE, file.read_text().split()[-1]))
    monkeypatch.setattr(look, "compare_versions", lambda *_: False)
    monkeypatch.setattr(look, "update_image", lambda file, *_, **__: written.append(file.read_bytes()))
    folder.put("sluice-1.2.0-arm64.raucb", b"bundle 1.2.0")
    folder.publish(LINGER, more='version = "1.2.0"')
    return written


def test_an_image_is_updated_as_a_person_updates_it(
    box: FleetBox, bundles: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert box.pull().exit_code == 0
    assert (told(box), bundles) == (("on-trial", ""), [b"bundle 1.2.0"])
    last_update.write(replace(UPDATE, result="good"))
    monkeypatch.setattr(our_image, "read", lambda: OurImage("1.2.0", "b", {}))
    box.pull()
    assert (told(box), "linger_ms = 100" in box.text) == (("good", ""), True), "then its settings follow"


def test_an_image_that_went_back_is_not_tried_again(box: FleetBox, bundles: list[bytes], folder: FleetFolder) -> None:
    box.pull()
    last_update.write(replace(UPDATE, result="went-back", reason="no reading came in", given_up="1.2.0"))
    for _ in range(2):
        assert box.pull().exit_code == 1
        assert (told(box), box.report.reason) == (("went-back", ""), "no reading came in")
    assert (bundles, box.restarts) == ([b"bundle 1.2.0"], 0)
    folder.publish(LINGER, serial=2, more='version = "1.2.0"\nattempt = 2')
    box.pull()
    assert (told(box), bundles) == (("on-trial", ""), [b"bundle 1.2.0"] * 2)


def test_an_image_whose_writing_was_cut_off_is_written_again(box: FleetBox, bundles: list[bytes]) -> None:
    box.pull()
    last_update.write(replace(UPDATE, result="went-back", reason="it was not written to its end", cuts=1))
    box.pull()
    assert (told(box), bundles) == (("on-trial", ""), [b"bundle 1.2.0"] * 2)


def test_a_box_that_was_not_restarted_after_its_image_was_written_restarts(
    box: FleetBox, bundles: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look was killed. If restarts do not help, the box does not restart each hour."""
    box.pull()
    last_update.write(UPDATE)
    restarts = []
    monkeypatch.setattr(service, "reboot", lambda: restarts.append(box.report.starts))
    monkeypatch.setattr(look, "_rauc_writes", lambda: True)
    assert (box.pull().exit_code, restarts) == (0, []), "RAUC's service goes on without the look"
    monkeypatch.setattr(look, "_rauc_writes", lambda: False)
    for _ in range(3):
        assert box.pull().exit_code == 0
        assert told(box) == ("on-trial", "")
    assert box.pull().exit_code == 1
    assert (told(box), box.report.reason) == (("went-back", ""), look.NOT_TRIED)
    assert (restarts, bundles) == ([1, 2, 3], [b"bundle 1.2.0"])


def test_an_update_by_hand_that_is_being_written_is_left_alone(
    box: FleetBox, bundles: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    box.pull()
    last_update.write(replace(UPDATE, new="1.3.0"))
    monkeypatch.setattr(service, "reboot", pytest.fail)
    for _ in range(2):
        box.pull()
        assert told(box) == ("on-trial", "")
    assert len(bundles) == 1


def test_an_image_that_went_back_outside_the_hours_is_not_tried_again(
    box: FleetBox, bundles: list[bytes], folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", serial=2, more='version = "1.2.0"\nhours = "01:00-04:00"')
    monkeypatch.setattr(look, "read_wall_clock", lambda _gateway: WallClock(0, 0))
    is_open = [True]
    monkeypatch.setattr(look, "is_within", lambda *_: is_open[0])
    box.pull()
    is_open[0] = False
    last_update.write(replace(UPDATE, result="went-back", reason="no reading came in", given_up="1.2.0"))
    box.pull()
    is_open[0] = True
    for _ in range(2):
        box.pull()
        assert (told(box), box.report.reason) == (("went-back", ""), "no reading came in")
    assert bundles == [b"bundle 1.2.0"]


def test_a_look_while_the_new_image_is_judged_changes_nothing(
    box: FleetBox, bundles: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    box.pull()
    before = box.text
    last_update.write(UPDATE)
    with monkeypatch.context() as tried:
        tried.setattr(our_image, "read", lambda: OurImage("1.2.0", "b", {}))
        box.pull()
        assert (told(box), box.text) == (("on-trial", ""), before)
    last_update.write(replace(UPDATE, result="went-back", reason="no reading came in", given_up="1.2.0"))
    box.pull()
    assert (told(box), box.text, bundles) == (("went-back", ""), before, [b"bundle 1.2.0"])


def test_settings_wait_while_an_image_that_somebody_installed_is_on_trial(
    box: FleetBox, bundles: list[bytes], folder: FleetFolder
) -> None:
    folder.publish(LINGER, serial=2)
    last_update.write(UPDATE)
    box.pull()
    assert (told(box), box.restarts) == (("waits", ""), 0)
    assert box.report.reason == "version 1.2.0 of the image is on trial"
    last_update.write(replace(UPDATE, result="good"))
    box.pull()
    assert (told(box), box.restarts, bundles) == (("good", ""), 1, [])


def test_an_image_is_tried_although_its_version_was_given_up_before(box: FleetBox, bundles: list[bytes]) -> None:
    """What became of an update before is not taken for what became of this one, also if the power goes at once."""
    last_update.write(replace(UPDATE, id="0", result="went-back", reason="no reading came in", given_up="1.2.0"))
    box.pull()
    box.pull()
    assert (told(box), len(bundles)) == (("on-trial", ""), 2)


def test_a_bundle_under_another_ones_name_is_not_installed(
    box: FleetBox, bundles: list[bytes], folder: FleetFolder
) -> None:
    folder.put("sluice-1.2.0-arm64.raucb", b"bundle 1.0.0")
    box.pull()
    assert (box.report.result, box.report.trial, bundles) == ("refused", None, [])
    assert box.report.reason == "it is version 1.0.0 by its own words, not 1.2.0"


def test_an_older_image_needs_to_be_allowed(
    box: FleetBox, bundles: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "compare_versions", lambda *_: True)
    box.pull()
    assert (box.report.result, bundles) == ("refused", [])
    assert "write allow_downgrade = true" in box.report.reason


def test_an_authority_that_another_user_could_change_is_not_opened(
    box: FleetBox, folder: FleetFolder, tmp_path: Path
) -> None:
    folder.publish(LINGER)
    authority = tmp_path / "ca.pem"
    box.config.write_text(before := re.sub("ca = .*", f'ca = "{authority}"', box.text))
    assert f"fleet.ca: {authority} cannot be used: No such file" in refused(box)
    authority.write_text(folder.authority.read_text())
    authority.chmod(0o666)
    assert f"fleet.ca: {authority} cannot be used: others can write it" in refused(box)
    assert box.text == before
    authority.chmod(0o644)
    box.pull()
    assert told(box) == ("good", "")


def test_an_error_that_nobody_has_foreseen_is_none_of_the_looks_own(
    box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a look that ends with 1, the unit says that it did what it should."""
    folder.publish(LINGER)
    monkeypatch.setattr(look, "load", lambda _file: 1 / 0)
    assert box.pull().exit_code == os.EX_SOFTWARE


# -- the report ----------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_read_stops_the_box(box: FleetBox, folder: FleetFolder) -> None:
    """Otherwise an old file that is signed would be taken in again."""
    folder.publish(LINGER, serial=7)
    box.pull()
    file = fleet_report.FOLDER / "report.json"
    file.write_bytes(file.read_bytes()[:40])
    before = box.text
    folder.publish(LINGER.replace("100", "10"), serial=6)
    shown = box.pull()
    assert (shown.exit_code, box.text) == (1, before)
    assert "remove it" in " ".join(shown.output.split())


def test_words_of_a_server_do_not_make_the_report_unreadable(
    box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish(LINGER, serial=7)
    box.pull()

    def fetch(*_: object) -> None:
        raise UpdateError("\x01" * 2_000 + "\u20ac" * 2_000)

    monkeypatch.setattr(download, "fetch", fetch)
    for _ in range(2):
        box.pull()
        assert (box.report.serial, box.report.result) == (7, "good")
        assert 1_900 < len(box.report.trouble.encode()) <= 2_000
