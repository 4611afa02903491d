"""The .deb: what is inside, for whom, that the same commit gives the same bytes, and whose packages are installed."""

import gzip
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from cyclonedx.model.bom import Bom
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from gateway.cli import main
from gateway.commands.update import update_command
from gateway.commands.update.programs import UpdateError
from gateway.commands.update.update_command import Box, Package, is_newer, read_package, trusted_keys, verify
from systemd import build_deb, build_pins, deb_documents, deb_python, deb_signing
from systemd.deb_python import ROOT, TARGETS, Target
from tests.support.box import BoxUnavailableError, foreign_tree
from tests.support.generated_pages import commands

DEB12 = TARGETS[0]
CLOUD_AND_TESTS = {"pyspark", "delta-spark", "pytest", "mypy", "ruff", "rich", "hypothesis", "playwright", "pip"}
ELF_MACHINES = {"amd64": 62, "arm64": 183}
"""elf(5): EM_X86_64, EM_AARCH64."""
BOX = Box("arm64", "12", "1.0.0~deb12")
PACKAGE = Package("sluice-gateway", "1.1.0~deb12", "arm64", "12")


# -- what goes in -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_gateways_own_packages_go_in_at_their_pins_and_nothing_of_the_cloud_side(target: Target) -> None:
    pins = deb_python.read_pins((ROOT / "constraints.txt").read_text())
    found = deb_python.gateway_pins(target, pins)
    names = {pin.name for pin in found}
    assert {"aiokafka", "click", "cramjam", "h11", "msgspec", "paho-mqtt", "structlog", "typing-extensions"} <= names
    assert not names & CLOUD_AND_TESTS
    assert all(pin.hashes for pin in found)


def test_what_make_deb_installs_is_enough_to_build_and_has_nothing_of_the_cloud_side() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pins = deb_python.read_pins(constraints)
    found = deb_python.read_pins(build_pins.requirements(constraints, build_pins.needs("deb")))
    needed = {pin.name: pin for target in TARGETS for pin in deb_python.gateway_pins(target, pins)}
    assert needed.items() <= found.items()
    assert {"click-man", "cyclonedx-python-lib", "packageurl-python", "pip"} <= found.keys()
    assert not found.keys() & (CLOUD_AND_TESTS - {"pip"})


@given(
    needs=st.dictionaries(
        st.sampled_from(["Spark", "ruff", "a.b", "a-c", "click"]), st.sets(st.sampled_from("vwxyz")), max_size=5
    ),
    inner=st.sets(st.tuples(st.sampled_from("vwxyz"), st.sampled_from("vwxyz"))),
    wanted=st.sets(st.sampled_from(["spark", "ruff", "a-b", "A_C", "click"])),
)
def test_a_pin_is_chosen_if_a_chosen_one_needs_it(
    needs: dict[str, set[str]], inner: set[tuple[str, str]], wanted: set[str]
) -> None:
    """Against a walk from needs to needed; the file says for each pin who needs it."""
    edges = {(canonicalize_name(name), need) for name, found in needs.items() for need in found} | inner
    names = ["spark", "ruff", "a-b", "a-c", "click", *"vwxyz"]
    pins = {}
    for name in names:
        via = ["sluice (pyproject.toml)", *sorted(one for one, other in edges if other == name)]
        told = f"    # via {via[0]}\n" if len(via) == 1 else "".join(f"    #   {one}\n" for one in ["via", *via])
        pins[name] = f"{name}==1.0 ; python_full_version >= '3' \\\n    --hash=sha256:aa\n{told}"
    reached: set[str] = set()
    waiting: list[str] = [canonicalize_name(name) for name in wanted]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [other for one, other in edges if one == name]
    expected = "".join(pins[name] for name in names if name in reached)
    assert build_pins.requirements("".join(pins.values()), wanted) == expected


def test_a_build_tool_that_is_not_pinned_is_told_by_name() -> None:
    with pytest.raises(LookupError, match=r"click-man: not in constraints\.txt; run `make lock`"):
        build_pins.requirements("click==8.5.1\n", ["click", "click-man"])


def test_what_is_not_pinned_is_told_by_name() -> None:
    with pytest.raises(deb_python.DependencyError, match=r"is not in constraints\.txt"):
        deb_python.gateway_pins(DEB12, {})


def test_a_pin_is_read_with_its_hashes_and_without_its_comments() -> None:
    text = "aio_Kafka==0.14.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n    # via sluice\nclick==8.1\n"
    assert deb_python.read_pins(text) == {
        "aio-kafka": deb_python.Pin("aio-kafka", "0.14.0", ("sha256:aa", "sha256:bb")),
        "click": deb_python.Pin("click", "8.1", ()),
    }


def test_a_wheel_that_is_there_and_is_not_the_one_that_is_pinned_does_not_go_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"what was pinned"
    pin = deb_python.Pin("some", "1.0", (f"sha256:{hashlib.sha256(content).hexdigest()}",))
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    wheel.write_bytes(content)
    (tmp_path / "some-0.9-py3-none-any.whl").write_bytes(b"of before")
    asked = []
    monkeypatch.setattr(deb_python, "_download", lambda *_: asked.append("pip"))
    assert deb_python.fetch_wheels(DEB12, [pin], tmp_path) == [wheel]
    assert not asked, "nothing is fetched that is there"
    wheel.write_bytes(content + b", changed")
    with pytest.raises(deb_python.DependencyError, match="no wheel of some"):
        deb_python.fetch_wheels(DEB12, [pin], tmp_path)
    assert asked


def test_a_key_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "release.key"
    deb_signing.make_key(path)
    before = path.read_bytes()
    deb_signing.make_key(path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


# -- versions ---------------------------------------------------------------------------------------


def test_later_commits_and_releases_sort_as_newer() -> None:
    order = [
        "0.1.0+git20261127055049.ddf18d3~deb12",
        "0.1.0+git20261127055049.ddf18d3~deb13",
        "0.1.0+git20261127055050.0000000~deb12",
        "0.1.0+git20270101000000.0000000~deb12",
        "0.1.1+git20261127055050.0000000~deb12",
        "0.2.0~deb12",
    ]
    for older, newer in pairwise(order):
        assert subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=False).returncode == 0


def test_the_version_is_the_projects_with_the_commits_time() -> None:
    assert re.fullmatch(r"0\.1\.0\+git\d{14}\.[0-9a-f]{7,}(\.changed)?", build_deb.commit_version("0.1.0"))


# -- the package ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "release.key"
    deb_signing.make_key(path)
    return path


@pytest.fixture(scope="module")
def release(key: Path) -> build_deb.Release:
    return build_deb.prepare("1.0.0", key)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, release: build_deb.Release) -> Path:
    """The package for the other architecture: nothing of it can be run here, and nothing is. It is packed quickly."""
    return build_deb.build(TARGETS[1], replace(release, xz_level=0), tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    path = tmp_path_factory.mktemp("tree")
    subprocess.run(["dpkg-deb", "--raw-extract", built, path], check=True)
    return path


@pytest.mark.long(seconds=60)
def test_the_same_commit_gives_the_same_bytes_and_the_same_signature(tmp_path: Path, key: Path) -> None:
    command = [sys.executable, "-m", "systemd.build_deb", "--target", str(DEB12), "--signing-key", str(key)]
    found = []
    for number, mask in enumerate((0o022, 0o077)):
        # In other folders, other processes, and under another umask.
        clone = tmp_path / f"clone{number}"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        # What pip fetched is the same for the same hashes.
        wheels = clone / "build/deb/wheels" / str(DEB12)
        if (build_deb.OUTPUT / "wheels" / str(DEB12)).exists():
            shutil.copytree(build_deb.OUTPUT / "wheels" / str(DEB12), wheels)
        subprocess.run(command, cwd=clone, umask=mask, stdout=subprocess.DEVNULL, check=True)
        (path,) = (clone / "build/deb").glob("*.deb")
        found.append((path.name, hashlib.sha256(path.read_bytes()).hexdigest(), path.with_name(f"{path.name}.sig")))
    (name, digest, signature), (other_name, other_digest, other_signature) = found
    assert (name, digest, signature.read_bytes()) == (other_name, other_digest, other_signature.read_bytes())
    assert ".changed" not in name


def test_it_is_small_and_for_its_architecture(built: Path, tree: Path) -> None:
    assert built.stat().st_size < build_deb.DEB_MB_MAX * 1e6 / 2
    compiled = sorted((tree / build_deb.LIBRARY).rglob("*.so"))
    assert {path.name.partition(".")[0] for path in compiled} >= {"cramjam", "_core"}
    for path in compiled:
        head = path.read_bytes()[:20]
        assert head[:4] == b"\x7fELF"
        assert struct.unpack_from("<H", head, 18) == (ELF_MACHINES["arm64"],), path


@pytest.mark.long(seconds=60)
def test_it_runs_on_the_other_architecture(tmp_path: Path, built: Path) -> None:
    qemu = shutil.which("qemu-aarch64-static")
    if qemu is None:
        pytest.skip("there is no `qemu-aarch64-static`: install Debian's package qemu-user-static")
    try:
        source = foreign_tree(12, "arm64", "python3.11,libgcc-s1")
    except BoxUnavailableError as reason:
        pytest.skip(str(reason))
    subprocess.run(["tar", "--extract", "--file", source, "--directory", tmp_path], check=True)
    subprocess.run(["dpkg-deb", "--extract", built, tmp_path], check=True)
    python = [qemu, "-L", str(tmp_path), str(tmp_path / "usr/bin/python3.11"), "-ISc"]
    # Each has a part that was compiled.
    program = (
        "import sys; sys.path.insert(0, '/usr/lib/sluice'); import platform, cramjam, msgspec; "
        "from aiokafka.record.default_records import DefaultRecordBatchBuilder as builder; "
        "from gateway import cli, pipeline; from gateway.commands.check import kafka as check; "
        "print(platform.machine(), builder.__module__, bytes(cramjam.zstd.decompress(cramjam.zstd.compress(b'on'))))"
    )
    ended = subprocess.run([*python, program], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("aarch64 aiokafka.record._crecords.default_records b'on'\n", "")


def test_everything_in_it_is_roots_and_nobody_else_can_write_it(built: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "--contents", built], capture_output=True, text=True, check=True).stdout
    modes = {(line.split()[0], line.split()[1]) for line in listed.splitlines()}
    assert modes <= {("drwxr-xr-x", "root/root"), ("-rw-r--r--", "root/root"), ("-rwxr-xr-x", "root/root")}
    assert "./usr/lib/sluice/gateway/page/index.html" in listed
    assert "gateway.toml" not in listed, "settings are written by setup, and are no file of the package"
    assert "spark" not in {Path(line.split()[5]).name for line in listed.splitlines()}


def test_debians_own_package_of_the_commands_name_cannot_take_its_place(tree: Path) -> None:
    control = (tree / "DEBIAN/control").read_text()
    assert re.search(r"(?m)^Package: sluice-gateway$", control), "apt upgrades by the name, and Debian has a sluice"
    assert re.search(r"(?m)^Conflicts: sluice$", control), "both have /usr/bin/sluice"


def test_the_checksums_are_those_of_its_files(tree: Path) -> None:
    ended = subprocess.run(["md5sum", "--quiet", "--check", "DEBIAN/md5sums"], cwd=tree, check=False)
    assert ended.returncode == 0
    listed = {line.split("  ", 1)[1] for line in (tree / "DEBIAN/md5sums").read_text().splitlines()}
    there = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert listed == {name for name in there if not name.startswith("DEBIAN/")}


def test_the_list_of_what_is_inside_is_complete_and_can_be_read_back(tree: Path) -> None:
    told = json.loads((tree / build_deb.DOCUMENTS / "sbom.cdx.json").read_text())
    pins = deb_python.gateway_pins(TARGETS[1], deb_python.read_pins((ROOT / "constraints.txt").read_text()))
    wanted = {(pin.name, pin.version) for pin in pins}
    assert {(canonicalize_name(one["name"]), one["version"]) for one in told["components"]} == wanted
    for component in told["components"]:
        (pin,) = (pin for pin in pins if pin.name == canonicalize_name(component["name"]))
        (digest,) = component["hashes"]
        assert f"sha256:{digest['content']}" in pin.hashes
        assert component["licenses"]
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    bom = Bom.from_json(told)  # type: ignore[attr-defined] # serialisation is added by a decorator
    assert bom.validate()
    assert len(bom.components) == len(wanted)


def test_every_package_inside_has_its_licence_there(tree: Path) -> None:
    documents = tree / build_deb.DOCUMENTS
    told = (documents / "copyright").read_text()
    for found in json.loads((documents / "sbom.cdx.json").read_text())["components"]:
        name = found["name"].lower()
        assert f"the authors of {found['name']} {found['version']}" in told
        if name != "pyserial":  # its wheel has none
            assert any((documents / "licenses" / name).iterdir()), name


def test_every_command_has_its_man_page_with_its_options_and_its_example(tree: Path) -> None:
    for path, command in commands(main, "sluice"):
        page = tree / "usr/share/man/man1" / f"{'-'.join(path)}.1.gz"
        text = gzip.decompress(page.read_bytes()).decode()
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0].replace("-", r"\-") in text, (path, parameter.opts)
        assert ".SH EXAMPLE" in text


def test_shells_can_read_their_completion(tree: Path) -> None:
    for shell, place in deb_documents._COMPLETIONS.items():
        path = tree / place
        assert "_SLUICE_COMPLETE" in path.read_text()
        if shell == "bash":
            subprocess.run(["bash", "-n", path], check=True)


def test_what_dpkg_runs_is_a_shells_and_holds_no_placeholder(tree: Path) -> None:
    for name in ("preinst", "postinst", "prerm", "postrm"):
        path = tree / "DEBIAN" / name
        subprocess.run(["sh", "-n", path], check=True)
        assert not re.search("@[A-Z]+@", path.read_text())
    for name in build_deb._PROGRAMS:
        assert (tree / name).read_text().startswith("#!/usr/bin/python3.11 -IS\n")


def test_the_public_key_of_who_signed_it_is_inside_and_fits(built: Path, tree: Path) -> None:
    folder = tree / build_deb.KEYS
    (found,) = trusted_keys([folder], owner=os.geteuid())
    verify(built, built.with_name(f"{built.name}.sig").read_bytes(), [found])
    assert read_package(built) == Package("sluice-gateway", "1.0.0~deb12", "arm64", "12")


def test_a_release_without_its_key_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(deb_signing.SigningError, match="SIGNING_KEY"):
        build_deb.prepare("1.0.0", tmp_path / "none.key")


def test_a_key_of_another_kind_signs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rsa.key"
    subprocess.run(["openssl", "genpkey", "-quiet", "-algorithm", "rsa", "-out", path], check=True)
    with pytest.raises(deb_signing.SigningError, match="no Ed25519 key"):
        deb_signing.public_key(path)


def test_text_that_roff_would_take_for_requests_is_printed_as_it_is() -> None:
    shown = subprocess.run(
        ["sh", "-c", "command -v nroff >/dev/null || exit 77; nroff -man"],
        input=".TH X 1\n.SH NAME\n" + deb_documents._roff(".begins with a dot\n'quoted\\n and --option"),
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.returncode == 77:
        pytest.skip("there is no `nroff`: install Debian's package groff-base")
    assert ".begins with a dot 'quoted\\n and --option" in shown.stdout


# -- whose packages are installed -------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> tuple[Path, bytes, Path]:
    """A file, its signature, and the public key to verify it by."""
    file = tmp_path / "sluice.deb"
    file.write_bytes(b"a package " * 1000)
    public = tmp_path / "keys" / "release.pem"
    public.parent.mkdir()
    public.write_text(deb_signing.public_key(key))
    public.chmod(0o644)
    return file, deb_signing.sign(file, key).read_bytes(), public


def test_what_one_of_the_keys_has_signed_is_verified(signed: tuple[Path, bytes, Path], tmp_path: Path) -> None:
    file, signature, public = signed
    deb_signing.make_key(tmp_path / "another.key")
    other = tmp_path / "another.pem"
    other.write_text(deb_signing.public_key(tmp_path / "another.key"))
    verify(file, signature, [other, public])
    with pytest.raises(UpdateError, match="none of the keys"):
        verify(file, signature, [other])


@given(place=st.integers(0, 9_999), bit=st.integers(0, 7))
def test_one_changed_bit_is_refused(tmp_path_factory: pytest.TempPathFactory, key: Path, place: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("bit")
    file = folder / "sluice.deb"
    content = bytearray(b"a package " * 1000)
    file.write_bytes(content)
    signature = deb_signing.sign(file, key).read_bytes()
    public = folder / "release.pem"
    public.write_text(deb_signing.public_key(key))
    content[place] ^= 1 << bit
    file.write_bytes(content)
    with pytest.raises(UpdateError, match="none of the keys"):
        verify(file, signature, [public])


@pytest.mark.parametrize("cut", [b"", b"x" * 63, b"x" * 65], ids=["empty", "short", "long"])
def test_a_signature_of_another_length_is_none(signed: tuple[Path, bytes, Path], cut: bytes) -> None:
    file, _, public = signed
    with pytest.raises(UpdateError, match=rf"has {len(cut)} bytes"):
        verify(file, cut, [public])


def test_a_key_that_others_can_write_is_not_trusted(signed: tuple[Path, bytes, Path]) -> None:
    public = signed[2]
    assert trusted_keys([public.parent], owner=os.geteuid()) == [public]
    public.chmod(0o664)
    with pytest.raises(UpdateError, match="no key to verify it by"):
        trusted_keys([public.parent], owner=os.geteuid())
    public.chmod(0o644)
    with pytest.raises(UpdateError, match="no key to verify it by"):
        trusted_keys([public.parent], owner=os.geteuid() + 1)


def test_a_key_that_others_can_replace_is_not_trusted(signed: tuple[Path, bytes, Path]) -> None:
    public = signed[2]
    for folder in (public.parent, public.parent.parent):
        for mode in (0o775, 0o757):
            folder.chmod(mode)
            with pytest.raises(UpdateError, match=r"release\.pem: others can write in a folder above it"):
                trusted_keys([public.parent], owner=os.geteuid())
        folder.chmod(0o755)
    assert trusted_keys([public.parent], owner=os.geteuid()) == [public]


def test_a_link_to_a_key_is_as_good_as_the_folders_that_it_leads_through(
    signed: tuple[Path, bytes, Path], tmp_path: Path
) -> None:
    public, open_to_all, keys = signed[2], tmp_path / "open", tmp_path / "linked"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    keys.mkdir()
    (keys / "direct.pem").symlink_to(public)
    assert trusted_keys([keys], owner=os.geteuid()) == [keys / "direct.pem"]
    (open_to_all / "moved").symlink_to(public.parent)
    (keys / "direct.pem").unlink()
    (keys / "roundabout.pem").symlink_to(open_to_all / "moved" / public.name)
    (keys / "gone.pem").symlink_to(tmp_path / "nothing")
    with pytest.raises(UpdateError, match=r"gone\.pem: No such file.*roundabout\.pem: others can write in a folder"):
        trusted_keys([keys], owner=os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_key_in_a_folder_of_another_users_is_not_trusted(signed: tuple[Path, bytes, Path]) -> None:
    public = signed[2]
    os.chown(public.parent, 64_123, 64_123)
    with pytest.raises(UpdateError, match=r"release\.pem: it, or a folder above it, is another user's"):
        trusted_keys([public.parent])


def deb(folder: Path, fields: str) -> Path:
    """A package with these fields and nothing inside."""
    (folder / "root/DEBIAN").mkdir(parents=True)
    (folder / "root/DEBIAN/control").write_text(f"{fields}Maintainer: nobody <nobody@localhost>\nDescription: none\n")
    path = folder / "some.deb"
    subprocess.run(["dpkg-deb", "--build", folder / "root", path], check=True, stdout=subprocess.DEVNULL)
    return path


def test_a_package_says_what_it_is(tmp_path: Path) -> None:
    fields = "Package: sluice-gateway\nVersion: 1.1.0~deb12\nArchitecture: arm64\nSluice-Debian: 12\n"
    assert read_package(deb(tmp_path, fields)) == PACKAGE


def test_another_package_says_so_too_and_what_is_none_is_told(tmp_path: Path) -> None:
    found = read_package(deb(tmp_path, "Package: hello\nVersion: 1\nArchitecture: all\n"))
    assert found == Package("hello", "1", "all", "")
    (tmp_path / "no.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(UpdateError, match="no Debian package"):
        read_package(tmp_path / "no.deb")


def changed(**fields: str) -> Package:
    return Package(**{name: fields.get(name, getattr(PACKAGE, name)) for name in Package.__struct_fields__})


def test_a_newer_version_for_this_box_is_taken() -> None:
    assert is_newer(PACKAGE, BOX, allow_downgrade=False)
    assert is_newer(PACKAGE, Box("arm64", "", ""), allow_downgrade=False), "the first one; a Debian without a number"


def test_the_version_that_is_installed_is_not_installed_again() -> None:
    assert not is_newer(changed(version="1.0.0~deb12"), BOX, allow_downgrade=False)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (changed(name="hello"), 'the package "hello"'),
        (changed(architecture="amd64"), "whose name has arm64"),
        (changed(debian="13"), "whose name has deb12"),
        (changed(debian=""), "none named"),
        (changed(version="0.9.9~deb12"), "--allow-downgrade"),
    ],
    ids=["another package", "another architecture", "another release", "no release", "older"],
)
def test_what_is_not_for_this_box_is_refused_with_what_to_do(package: Package, words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        is_newer(package, BOX, allow_downgrade=False)


def test_an_older_version_is_taken_where_that_is_meant() -> None:
    assert is_newer(changed(version="0.9.9~deb12"), BOX, allow_downgrade=True)


def test_a_raspberry_pi_has_debians_release() -> None:
    assert update_command._debian({"ID": "raspbian", "VERSION_ID": "12"}) == "12"
    assert update_command._debian({"ID": "debian"}) == ""
    assert update_command._debian({"ID": "ubuntu", "VERSION_ID": "24.04"}) == ""


def test_an_update_without_root_asks_for_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "some.deb").write_bytes(b"")
    shown = CliRunner().invoke(main, ["update", str(tmp_path / "some.deb")])
    assert shown.exit_code == 1
    assert "with sudo" in shown.output


def test_a_control_character_of_a_package_reaches_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UpdateError("it is \x1b[2J\nand more")

    monkeypatch.setattr(update_command, "_update", refuse)
    (tmp_path / "some.deb").write_bytes(b"")
    shown = CliRunner().invoke(main, ["update", str(tmp_path / "some.deb")])
    assert "\x1b" not in shown.output
    assert shown.output.splitlines()[1].strip() == "and more"
