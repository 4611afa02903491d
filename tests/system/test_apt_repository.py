"""The apt repository: what apt makes of it, and whom it refuses. Apt is Debian's own, with folders of the test's."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from release import apt_repository
from release.apt_repository import SUITES, Offer, RepositoryError, main, make, make_key
from systemd.build_deb import PACKAGE
from systemd.deb_python import TARGETS, Target
from tests.support.box import Box, box_or_skip, build
from tests.support.fixtures_boxes import NEW, OLD
from tests.support.package_site import write_answers

pytestmark = pytest.mark.slow

MACHINES = 12


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository, and the folder in which `make deb` would put packages."""

    built: Path
    folder: Path
    key: Path

    def build(self, version: str, note: str = "") -> None:
        """Build packages that hold nothing."""
        for target in TARGETS:
            control = self.built / "root" / "DEBIAN" / "control"
            control.parent.mkdir(parents=True, exist_ok=True)
            control.write_text(
                f"Package: {PACKAGE}\nVersion: {version}~deb{target.release}\nArchitecture: {target.architecture}\n"
                f"Maintainer: nobody <nobody@sluice.invalid>\nDescription: nothing{note}\n"
            )
            made = self.built / f"{PACKAGE}_{version}_{target}.deb"
            command = ["dpkg-deb", "--root-owner-group", "--build", str(self.built / "root"), str(made)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    def offer(self, version: str, phased_percent: int = 100) -> list[Target]:
        # As from a web server, apt makes copies of the indexes; from `file:` it would go on reading these.
        return make(self.built, self.folder, Offer(version, f"copy:{self.folder}", self.key, phased_percent))

    def contents(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def forget_key(self) -> None:
        """Do as somebody who has lost the key, and will give each gateway a new one."""
        for sources in self.folder.glob("*.sources"):
            sources.unlink()


@dataclass(frozen=True, slots=True)
class Apt:
    """Debian's apt on a machine that has nothing but a list of sources, and perhaps the gateway."""

    root: Path

    def set_up(self, sources: str, architecture: str = "amd64") -> None:
        for folder in (
            "etc/apt/sources.list.d",
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
        ):
            (self.root / folder).mkdir(parents=True)
        (self.root / "etc/apt/sources.list.d/sluice.sources").write_text(sources)
        (self.root / "apt.conf").write_text(
            f'Dir "{self.root}";\nDir::State::status "{self.root}/status";\nAPT::Sandbox::User "root";\n'
            f'APT::Architecture "{architecture}";\nAPT::Architectures {{ "{architecture}"; }};\n'
            # It would take a file of the same second and size for the one that it has read.
            'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
        )
        self.have(None)

    def have(self, version: str | None) -> None:
        """Pretend that this version is installed."""
        (self.root / "status").write_text(
            f"Package: {PACKAGE}\nStatus: install ok installed\nVersion: {version}\nArchitecture: amd64\n"
            "Maintainer: nobody <nobody@sluice.invalid>\nDescription: nothing\n\n"
            if version
            else ""
        )

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"APT_CONFIG": str(self.root / "apt.conf"), "LC_ALL": "C.UTF-8"}
        # Whoever builds packages for others wants no draw.
        environment.pop("SOURCE_DATE_EPOCH", None)
        command = ["apt-get", *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def update(self) -> str:
        """Fetch the indexes. Returns what apt said against them."""
        ended = self.call("update", "--error-on=any")
        assert (ended.returncode == 0) == (not ended.stderr), ended.stderr
        return ended.stderr

    def would_install(self, *command: str, machine: int = 0) -> str | None:
        """The version that a command would install on one of many machines."""
        ended = self.call("--simulate", *as_machine(machine), *command)
        assert ended.returncode == 0, ended.stderr
        # Inst sluice-gateway [1.0.0~deb12] (1.1.0~deb12 Sluice:bookworm [amd64])
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"Inst {PACKAGE} ")]
        return lines[0].partition("(")[2].split()[0] if lines else None

    def upgrade(self) -> dict[int, str]:
        """The machines that would upgrade now, and to which version."""
        found = {machine: self.would_install("upgrade", machine=machine) for machine in range(MACHINES)}
        return {machine: version for machine, version in found.items() if version}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "apt.key"
    make_key(path)
    return path


@pytest.fixture
def repository(tmp_path: Path, key: Path) -> Repository:
    made = Repository(tmp_path / "built", tmp_path / "apt", key)
    made.build("1.0.0")
    made.offer("1.0.0")
    return made


@pytest.fixture
def apt(tmp_path: Path, repository: Repository) -> Apt:
    made = Apt(tmp_path / "machine")
    made.set_up((repository.folder / "sluice-bookworm.sources").read_text())
    assert made.update() == ""
    return made


def test_each_machine_gets_the_package_of_its_release_and_architecture(repository: Repository, tmp_path: Path) -> None:
    for target in TARGETS:
        apt = Apt(tmp_path / str(target))
        sources = repository.folder / f"sluice-{SUITES[target.release]}.sources"
        apt.set_up(sources.read_text(), target.architecture)
        assert apt.update() == ""
        assert apt.would_install("install", PACKAGE) == f"1.0.0~deb{target.release}"
        assert apt.call("download", PACKAGE).returncode == 0
        (fetched,) = apt.root.glob("*.deb")
        assert fetched.read_bytes() == (repository.built / f"{PACKAGE}_1.0.0_{target}.deb").read_bytes()


def test_a_share_of_the_machines_upgrades_and_a_larger_share_has_the_same_ones(
    apt: Apt, repository: Repository
) -> None:
    apt.have("1.0.0~deb12")
    assert apt.would_install("upgrade") is None
    repository.build("1.1.0")
    repository.offer("1.1.0", 30)
    assert apt.update() == ""
    few = apt.upgrade()
    repository.offer("1.1.0", 70)
    assert apt.update() == ""
    more = apt.upgrade()
    # The draw is of the name, the version and the machine: it is always this one.
    assert 0 < len(few) < len(more) < MACHINES
    assert few.items() < more.items()
    repository.offer("1.1.0")
    assert apt.update() == ""
    assert apt.upgrade() == dict.fromkeys(range(MACHINES), "1.1.0~deb12")

    # A newer version is drawn anew. Whom it leaves out gets no older one either, and a new machine has the newest.
    repository.build("1.2.0")
    repository.offer("1.2.0", 30)
    assert apt.update() == ""
    found = apt.upgrade()
    assert set(found.values()) == {"1.2.0~deb12"}
    assert found.keys() != few.keys()
    apt.have(None)
    assert {apt.would_install("install", PACKAGE, machine=each) for each in range(2)} == {"1.2.0~deb12"}


def test_a_withdrawn_version_is_no_longer_offered_and_the_one_before_stays(apt: Apt, repository: Repository) -> None:
    repository.build("1.1.0")
    repository.offer("1.1.0", 20)
    with pytest.raises(RepositoryError, match=r"has 1\.1\.0~deb12, which is newer than 1\.0\.0~deb12: .* or remove "):
        repository.offer("1.0.0")
    for package in repository.folder.rglob("*_1.1.0*.deb"):
        package.unlink()
    repository.offer("1.0.0")
    assert apt.update() == ""
    apt.have("1.0.0~deb12")
    assert apt.upgrade() == {}
    apt.have("1.1.0~deb12")
    assert apt.would_install("upgrade") is None, "who has it keeps it, until somebody takes it back"
    assert apt.would_install("install", "--allow-downgrades", f"{PACKAGE}=1.0.0~deb12") == "1.0.0~deb12"


def test_indexes_of_another_key_and_changed_ones_are_refused(apt: Apt, repository: Repository, tmp_path: Path) -> None:
    repository.build("1.1.0")
    other = tmp_path / "other.key"
    make_key(other)
    repository.forget_key()
    Repository(repository.built, repository.folder, other).offer("1.1.0")
    assert "NO_PUBKEY" in apt.update()
    repository.forget_key()
    repository.offer("1.1.0")
    release = repository.folder / "dists" / "bookworm" / "InRelease"
    genuine = release.read_text()
    release.write_text(genuine.replace("Origin: Sluice", "Origin: sluice"))
    assert "BADSIG" in apt.update()
    release.write_text(genuine)
    packages = repository.folder / "dists" / "bookworm" / "main" / "binary-amd64" / "Packages"
    packages.write_text(packages.read_text().replace("1.1.0", "1.1.1"))
    assert "Hash Sum mismatch" in apt.update()
    # What apt had before still counts.
    assert apt.would_install("install", PACKAGE) == "1.0.0~deb12"
    (package,) = repository.folder.glob("pool/bookworm/*_1.0.0~deb12_amd64.deb")
    package.write_bytes(package.read_bytes()[:-1] + b"x")
    assert apt.call("download", PACKAGE).returncode != 0
    assert not [*apt.root.glob("*.deb")]


def test_a_version_means_one_package_forever(repository: Repository) -> None:
    repository.build("1.0.0", note=" new")
    with pytest.raises(RepositoryError, match=r"has 1\.0\.0~deb12 with other bytes"):
        repository.offer("1.0.0")


def test_mistakes_of_who_makes_it_are_told(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--packages", str(repository.built), "--output", str(repository.folder), "--url", "https://example.com"]
    with pytest.raises(SystemExit, match=r"no package of version 1\.0\.1 in .*: run `make deb` first"):
        main([*asked, "--key", str(repository.key), "--version", "1.0.1"])
    nothing = tmp_path / "public.key"
    nothing.write_text("no key")
    with pytest.raises(SystemExit, match=r"gpg failed: .*no valid OpenPGP data"):
        main([*asked, "--key", str(nothing), "--version", "1.0.0"])
    with pytest.raises(SystemExit):
        main([*asked, "--phased", "0"])
    assert "0 is not between 1 and 100; to stop a version, remove its package" in capsys.readouterr().err


def test_a_key_that_gateways_do_not_trust_changes_nothing(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.build("1.1.0")
    before = repository.contents()
    other = tmp_path / "other.key"
    make_key(other)
    with pytest.raises(RepositoryError, match=r"have .*sluice-bookworm\.sources would refuse what .*other\.key signs"):
        Repository(repository.built, repository.folder, other).offer("1.1.0")
    # Somebody forgot APT_KEY, and there is no key of our own, or none any more.
    own = tmp_path / "signing" / "apt.key"
    monkeypatch.setattr(apt_repository, "OWN_KEY", own)
    with pytest.raises(SystemExit, match=r"there is no .*apt\.key, .* trust no new key: name .*APT_KEY"):
        main(["--packages", str(repository.built), "--output", str(repository.folder), "--url", "u"])
    assert not own.exists()
    assert repository.contents() == before


def test_a_key_that_cannot_sign_changes_nothing(repository: Repository, tmp_path: Path) -> None:
    repository.build("1.1.0")
    before = repository.contents()
    locked = tmp_path / "locked.key"
    home = tmp_path / "gpg"
    home.mkdir(0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "secret"]
    subprocess.run([*gpg, "--quick-generate-key", "Locked", "ed25519", "sign", "never"], check=True)
    subprocess.run([*gpg, "--output", str(locked), "--export-secret-keys"], check=True)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    with pytest.raises(RepositoryError, match=r"locked\.key cannot sign, perhaps as it has a passphrase: gpg failed"):
        Repository(repository.built, repository.folder, locked).offer("1.1.0")
    assert repository.contents() == before


def test_if_an_index_cannot_be_signed_the_former_one_stays(
    apt: Apt, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.build("1.1.0")
    release = repository.folder / "dists" / "bookworm" / "InRelease"
    before = release.read_bytes()

    def sign_nothing_only(text: str, home: Path) -> str:
        if text:
            raise RepositoryError("the disk is full")
        return sign(text, home)

    sign = apt_repository._signed
    with monkeypatch.context() as patched:
        patched.setattr(apt_repository, "_signed", sign_nothing_only)
        with pytest.raises(RepositoryError, match="the disk is full"):
            repository.offer("1.1.0")
    assert release.read_bytes() == before
    repository.offer("1.1.0")
    assert apt.update() == ""
    assert apt.would_install("install", PACKAGE) == "1.1.0~deb12"


def test_a_version_is_for_all_targets_of_the_repository_or_for_none(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.build("1.1.0")
    for package in repository.built.glob("*_1.1.0_*_deb13.deb"):
        package.unlink()
    before = repository.contents()
    with pytest.raises(RepositoryError, match=r"older versions for amd64_deb13, arm64_deb13, but .* has no 1\.1\.0"):
        repository.offer("1.1.0")
    assert repository.contents() == before
    # Somebody who has no such gateways any more says so.
    for package in repository.folder.glob("pool/trixie/*.deb"):
        package.unlink()
    command = ["--packages", str(repository.built), "--output", str(repository.folder), "--key", str(repository.key)]
    main([*command, "--url", "https://example.com", "--version", "1.1.0"])
    assert "1.1.0 for 100 % of the gateways on amd64_deb12, arm64_deb12: copy" in capsys.readouterr().out


def test_the_key_is_its_owners_alone_and_is_never_replaced(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with pytest.raises(FileExistsError):
        make_key(key)
    assert key.read_bytes() == before


@pytest.mark.box
@pytest.mark.long(seconds=90)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", SUITES)
def test_a_gateway_is_installed_upgraded_when_it_is_drawn_and_taken_back(
    release: int, tmp_path: Path, repository: Repository
) -> None:
    with box_or_skip(tmp_path, release) as box:
        # This repository is for one kind of gateway.
        for package in repository.built.glob("*.deb"):
            package.unlink()
        for version in (OLD, NEW):
            build(repository.built, f"amd64_deb{release}", version=version, xz_level=0)
        shutil.rmtree(repository.folder)
        repository.offer(OLD)
        box.shown[repository.folder] = "/srv/sluice"
        sources = (repository.folder / f"sluice-{SUITES[release]}.sources").read_text()
        box.write("/etc/apt/sources.list.d/sluice.sources", sources.replace(str(repository.folder), "/srv/sluice"))
        # There is no Kafka, and no network: it starts all the same.
        write_answers(box, "/boot/firmware", "kafka.example:9092")
        box.boot()
        box.apt("update")
        box.apt("install", PACKAGE)
        assert box.run("sluice", "--version").strip() == f"sluice {OLD}"
        assert box.property("sluice.service", "ActiveState") == "active", box.journal("sluice-provision.service")

        repository.offer(NEW, 50)
        box.apt("update")
        drawn, left_out = (
            next(each for each in range(MACHINES) if is_drawn(box, each) is wanted) for wanted in (True, False)
        )
        box.apt("upgrade", *as_machine(left_out))
        assert box.run("sluice", "--version").strip() == f"sluice {OLD}"
        box.apt("upgrade", *as_machine(drawn))
        assert box.run("sluice", "--version").strip() == f"sluice {NEW}"
        assert box.property("sluice.service", "ActiveState") == "active", box.journal()
        box.apt("install", "--allow-downgrades", f"{PACKAGE}={OLD}~deb{release}")
        assert box.run("sluice", "--version").strip() == f"sluice {OLD}"
        assert box.property("sluice.service", "ActiveState") == "active", box.journal()

        # The program that verifies signatures is another one on each release.
        make_key(tmp_path / "other.key")
        repository.forget_key()
        Repository(repository.built, repository.folder, tmp_path / "other.key").offer(NEW)
        assert box.call("apt-get", "update", "--error-on=any").returncode != 0
        assert not is_drawn(box, left_out)


def as_machine(number: int) -> tuple[str, str]:
    return ("--option", f"APT::Machine-ID={number:032x}")


def is_drawn(box: Box, machine: int) -> bool:
    """Whether an upgrade would take the new version on this machine."""
    return f"Inst {PACKAGE} " in box.apt("upgrade", "--simulate", *as_machine(machine))
