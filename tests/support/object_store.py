"""A real object store on loopback: S3Proxy, which speaks S3's protocol and keeps objects in memory."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import quote

from demo.kafka_broker import HOST, free_ports
from tests.support.java_server import java_server

JARS = Path(__file__).resolve().parents[2] / "build" / "jars"
BUCKET = "bucket"
PROPERTIES = """\
s3proxy.endpoint=http://{host}:{port}
s3proxy.authorization=none
jclouds.provider=transient
jclouds.identity=nobody
jclouds.credential=none
"""
LOGGING = """\
<configuration>
  <appender name="terminal" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %level %logger: %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="terminal"/></root>
</configuration>
"""
SPARK_DEFAULTS = """\
spark.hadoop.fs.s3a.endpoint http://{host}:{port}
spark.hadoop.fs.s3a.endpoint.region us-east-1
spark.hadoop.fs.s3a.path.style.access true
spark.hadoop.fs.s3a.access.key nobody
spark.hadoop.fs.s3a.secret.key none
# S3Proxy does not know the checksum that comes with many deletions at once.
spark.hadoop.fs.s3a.multiobjectdelete.enable false
"""


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A started store with one bucket."""

    url: str
    """URL of the bucket for Hadoop."""
    address: str
    """URL of the store for HTTP. Nobody has to log in."""
    spark_conf: Path
    """A folder for `SPARK_CONF_DIR`: where the store is, and how to log in."""
    jars: Path
    """A folder for `SLUICE_SPARK_JARS`."""

    def for_deltalake(self) -> dict[str, str]:
        """The variables by which deltalake finds the store."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "none",
        }

    def put(self, folder: Path, name: str) -> None:
        """Copy a folder into the bucket."""
        with closing(HTTPConnection(self.address.removeprefix("http://"), timeout=10)) as connection:
            for path in folder.rglob("*"):
                if path.is_file():
                    place = quote(f"/{BUCKET}/{name}/{path.relative_to(folder)}")
                    connection.request("PUT", place, path.read_bytes())
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status != HTTPStatus.OK:
                        raise RuntimeError(f"{place}: {answer.status}")


@contextmanager
def object_store(directory: Path) -> Iterator[ObjectStore]:
    """A store for the length of a `with`, up and answering."""
    for needed in ("s3", "s3proxy"):
        if not any((JARS / needed).glob("*.jar")):
            raise RuntimeError(f"there are no jars in {JARS / needed}: `make test` fetches them")
    (port,) = free_ports(1)
    spark_conf, jars = directory / "conf", directory / "jars"
    spark_conf.mkdir(parents=True)
    jars.mkdir()
    properties, logging, log = (directory / name for name in ("s3proxy.properties", "logback.xml", "s3proxy.log"))
    properties.write_text(PROPERTIES.format(host=HOST, port=port))
    logging.write_text(LOGGING)
    (spark_conf / "spark-defaults.conf").write_text(SPARK_DEFAULTS.format(host=HOST, port=port))
    for jar in [*(JARS / "spark").glob("*.jar"), *(JARS / "s3").glob("*.jar")]:
        (jars / jar.name).symlink_to(jar)
    arguments = [f"-Dlogback.configurationFile={logging}", "-cp", f"{JARS / 's3proxy'}/*"]
    arguments += ["org.gaul.s3proxy.Main", "--properties", str(properties)]
    with java_server(arguments, log, lambda: _makes_bucket(port), "the object store"):
        yield ObjectStore(f"s3a://{BUCKET}", f"http://{HOST}:{port}", spark_conf, jars)


def _makes_bucket(port: int) -> bool:
    with closing(HTTPConnection(HOST, port, timeout=10)) as connection:
        try:
            connection.request("PUT", f"/{BUCKET}")
            # A conflict: it was made, and the answer came too late.
            return connection.getresponse().status in {HTTPStatus.OK, HTTPStatus.CONFLICT}
        except (OSError, HTTPException):
            return False
