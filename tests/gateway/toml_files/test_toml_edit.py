"""Settings are changed in a text that a person wrote, and the rest of it stays."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.toml_files.editor import edited
from gateway.toml_files.writer import toml_text

WRITTEN = """\
# My gateway.
fallback_topic = "strays" # by hand

[gateway]
id = 'barn # 1'   # the old barn

# Kafka of the co-operative
[kafka]
bootstrap = [
    "a:1",  # first
]
  linger_ms = 5 # odd indent
[kafka.tls]
ca = "/x.pem"

# sensors
[mqtt_listener]
port = 1900
[mqtt_listener.users]
"7" = "x"
# about the log
[log]
level = "debug"
"""


def changed(*path: str, to: object) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads(WRITTEN)
    inner = document
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("path", "to", "old", "new"),
    [
        (("gateway", "id"), "barn-2", "id = 'barn # 1'   # the old barn", 'id = "barn-2" # the old barn'),
        (("kafka", "linger_ms"), 7, "  linger_ms = 5 # odd indent", "  linger_ms = 7 # odd indent"),
        (("gateway", "namespace"), "n", "# the old barn\n", '# the old barn\nnamespace = "n"\n'),
        (("kafka", "tls"), None, '[kafka.tls]\nca = "/x.pem"\n\n', ""),
        (
            ("mqtt_listener",),
            None,
            '[mqtt_listener]\nport = 1900\n[mqtt_listener.users]\n"7" = "x"\n',
            "",
        ),
        (("log", "level"), None, 'level = "debug"\n', ""),
        (("log", "format"), "json", 'level = "debug"\n', 'level = "debug"\nformat = "json"\n'),
        (("serial", "ports"), ["all"], 'level = "debug"\n', 'level = "debug"\n\n[serial]\nports = ["all"]\n'),
        (("status_page",), {}, 'level = "debug"\n', 'level = "debug"\n\n[status_page]\n'),
        (("fallback_topic",), "x", '"strays" # by hand', '"x" # by hand'),
    ],
)
def test_one_change_is_one_change(path: tuple[str, ...], to: object, old: str, new: str) -> None:
    assert old in WRITTEN
    assert edited(WRITTEN, changed(*path, to=to), {}) == WRITTEN.replace(old, new)


def test_a_new_setting_has_its_note() -> None:
    text = edited("[a]\nx = 1\n", {"a": {"x": 1, "y": 2}, "b": {"z": {}}}, {("a", "y"): "why", ("b", "z"): "what"})
    assert text is not None
    assert text.splitlines()[2].split("#") == ["y = 2".ljust(40), " why"]
    assert text.splitlines()[-1].endswith("# what")


@pytest.mark.parametrize(
    "text",
    ["a = [\n1,\n2]\n", "a = { b = 1 }\n", '"a" = """\nx\n"""\n', "a.b = 1\n", "[[a]]\nb = 1\n"],
)
def test_what_is_written_otherwise_is_left_to_others(text: str) -> None:
    found = edited(text, {"a": {"b": {"c": 3}}, "x": 1}, {})
    assert found is None or tomllib.loads(found) == {"a": {"b": {"c": 3}}, "x": 1}


names = st.sampled_from(["a", "b", "c d", "#", "="])
leaves = st.one_of(st.booleans(), st.integers(0, 9), st.text(max_size=5), st.lists(st.integers(0, 9), max_size=2))
documents = st.recursive(
    st.dictionaries(names, leaves, max_size=3),
    lambda inner: st.dictionaries(names, st.one_of(leaves, inner), max_size=4),
    max_leaves=8,
)


@given(documents, documents)
def test_the_edited_text_says_the_new_document(before: dict[str, Any], after: dict[str, Any]) -> None:
    text = edited(toml_text(before, {}), after, {})
    assert text is None or tomllib.loads(text) == after


@given(documents)
def test_without_a_change_nothing_changes(document: dict[str, Any]) -> None:
    text = toml_text(document, {})
    assert edited(text, document, {}) == text
