"""Certificates made by openssl: an authority, and what it signs for servers and clients."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tests.support.waiting import patience

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

# `openssl ca` is the one command that sets both dates of a certificate, in every version that is about.
CA_CONFIG = """\
[ca]
default_ca = authority
[authority]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[leaf]
{extension}
"""


class Identity(NamedTuple):
    """A certificate and its private key, PEM."""

    certificate: Path
    key: Path

    @property
    def key_store(self) -> Path:
        """Both in one file, as Kafka's `ssl.keystore.type=PEM` wants them."""
        path = self.certificate.with_suffix(".both.pem")
        path.write_text(self.key.read_text() + self.certificate.read_text())
        return path


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA with a folder of its own."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def sign(self, name: str, alternative_names: str = "IP:127.0.0.1", *, valid: Sequence[timedelta] = ()) -> Identity:
        """Make NAME.pem and NAME.key. `alternative_names` as openssl writes them, "" for none; the name is the CN.

        `valid` is from when to when, from now: an hour ago to the day after tomorrow without it.
        """
        certificate, key, request = (self.folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr"))
        openssl("req", *EC, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extension = f"subjectAltName={alternative_names}" if alternative_names else "basicConstraints=CA:FALSE"
        config = self.folder / "ca.cnf"
        config.write_text(CA_CONFIG.format(folder=self.folder, extension=extension))
        (self.folder / "index.txt").touch()
        begin, end = valid or (timedelta(hours=-1), timedelta(days=2))
        openssl(
            *("ca", "-batch", "-notext", "-rand_serial", "-config", config, "-extensions", "leaf"),
            *("-cert", self.certificate, "-keyfile", self.folder / "ca.key", "-in", request, "-out", certificate),
            *("-startdate", _date(begin), "-enddate", _date(end)),
        )
        return Identity(certificate, key)


def make_authority(folder: Path, name: str = "test CA") -> Authority:
    """A CA that signs for as long as a test takes; `folder` is made."""
    folder.mkdir(parents=True)
    authority = Authority(folder)
    files = ("-keyout", folder / "ca.key", "-out", authority.certificate)
    openssl("req", "-x509", *EC, *files, "-days", "2", "-subj", f"/CN={name}")
    return authority


def _date(since_now: timedelta) -> str:
    return f"{datetime.now(UTC) + since_now:%Y%m%d%H%M%SZ}"


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=patience(20))
