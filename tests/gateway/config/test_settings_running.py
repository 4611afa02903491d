"""Whether the gateway runs with the settings in the file: judged by their content, not by their spelling."""

import os
import re
from pathlib import Path

import pytest

from gateway.commands.settings_command import sections
from gateway.config.config_file import load
from gateway.config.running_settings import SECRETS, SettingsFile, digest, digest_for_others

TEXT = """
[gateway]
id = "barn-1"
[buffer]
path = "buffer.db"
[kafka]
bootstrap = ["127.0.0.1:1"]
[mqtt_listener]
anonymous = true
"""


def written(folder: Path, text: str = TEXT) -> Path:
    config = folder / "gateway.toml"
    config.write_text(text)
    return config


def test_the_same_settings_are_the_same_wherever_they_are_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    assert digest(load(Path("gateway.toml"))) == digest(load(tmp_path / "gateway.toml"))


def test_the_daemon_sees_that_its_settings_were_changed_and_changed_back(tmp_path: Path) -> None:
    config = written(tmp_path)
    file = SettingsFile(config, load(config))
    assert file.change() is None
    written(tmp_path, TEXT + "# a comment\n")
    assert file.change() is None
    written(tmp_path, TEXT + "port = 1884\n")
    assert file.change() == ""
    written(tmp_path, TEXT.replace("barn-1", "barn-9"))
    assert file.change() == ", as default/barn-1"
    # A file that cannot be used now changes no answer.
    written(tmp_path, "[gateway")
    assert file.change() == ", as default/barn-1"
    config.unlink()
    assert file.change() == ", as default/barn-1"
    written(tmp_path)
    assert file.change() is None


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path)
    file = SettingsFile(config, load(config))
    file.change()
    monkeypatch.setattr("gateway.config.config_file.load", lambda _: os.abort())
    assert file.change() is None


def test_others_see_settings_change_and_neither_secrets_nor_names(tmp_path: Path) -> None:
    users = '[mqtt_listener.users]\nwell = "{}"\n'
    broker = '[[mqtt_brokers]]\nhost = "broker.example"\nuser = "barn"\npassword = "{}"\ntopics = ["device/#"]\n'

    def told(*lines: str, name: str = "barn-1") -> str:
        text = TEXT.replace("anonymous = true", "").replace("barn-1", name) + "".join(lines)
        return digest_for_others(load(written(tmp_path, text)))

    with_secrets = told(users.format("a" * 64), broker.format("meadow"))
    assert told(users.format("b" * 64), broker.format("gate")) == with_secrets
    assert told(users.format("a" * 64), broker.format("meadow"), name="barn-2") == with_secrets
    assert told(users.format("a" * 64).replace("well", "mill"), broker.format("meadow")) != with_secrets
    assert told(users.format("a" * 64), broker.format("meadow").replace('password = "meadow"\n', "")) != with_secrets
    assert told() != with_secrets


def test_each_setting_that_speaks_of_secrets_is_one_or_none() -> None:
    spoken = {
        setting.name
        for section in sections()
        for setting in section.settings
        if re.search("password|secret|token", setting.name + setting.about)
    }
    files = {"password_file", "devices_file", "token_ca", "client_ca"}
    assert spoken == SECRETS | files | {"mechanism", "token_url", "extensions", "failed_logins_per_minute_max"}
