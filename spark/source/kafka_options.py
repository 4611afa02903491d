"""Reads settings of the Kafka client (TLS, SASL, time-outs) from the command line and a file, and hides secrets."""

import difflib
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark.engine.told_error import ToldError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIG_BYTES_MAX = 1_000_000
"""Bytes of a file of settings. Settings with certificates in them need fewer."""

# Names that Kafka itself takes for passwords, and likely names of secrets in settings of other classes.
HIDDEN_NAMES = r"password|passwd|secret|credential|jaas|keystore[.]key|access[.]?key|token(?![.]endpoint)"
HIDDEN = re.compile(HIDDEN_NAMES, re.IGNORECASE)
REDACTION = "spark.sql.redaction.options.regex"
"""Spark's setting with the names of options that it hides in its plans, its user interface and its event log."""

NOT_SETTABLE = {
    "bootstrap.servers": "give it as --bootstrap",
    "auto.offset.reset": "where to begin is decided by what was read before",
    "enable.auto.commit": "what was read is noted in the checkpoint, not in Kafka",
    "key.deserializer": "records are read as bytes",
    "value.deserializer": "records are read as bytes",
    "interceptor.classes": "Spark does not allow it: an interceptor could change the records",
    "group.id": "Spark gives each query a group of its own, and two with the same would take each other's partitions; "
    "for an ACL by prefix use groupIdPrefix",
}
SPARK_OPTIONS = frozenset(
    {
        *("groupIdPrefix", "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
        *("minPartitions", "maxRecordsPerPartition"),
    }
)
"""Options of Spark's connector, beside Kafka's own settings, that a person may set."""
JAAS_WORD = re.compile(r"^(?:required|requisite|sufficient|optional|username|password)$|[.]\w+Module$")
ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
CLASS_NAMES = re.compile(r"(?:callback\.handler|login|engine\.factory)\.class$|^config\.providers")
"""Settings that name a class. The class may have settings of its own, which Kafka does not know."""


class KafkaOptionError(ToldError):
    """A setting cannot be used. The message says which, why and what to do, and holds no secret."""


def kafka_options(given: Sequence[str], config: Path | None = None) -> dict[str, str]:
    """Return Kafka's settings by name, from `key=value` texts and a file. The texts override the file.

    Spark's prefix `kafka.` is dropped from names. Raises KafkaOptionError.
    """
    options = {} if config is None else _read_config(config)
    for text in given:
        name, separator, value = text.partition("=")
        name = _plain_name(name)
        if not separator or not name:
            # Do not show the text: it may be a password without its key.
            raise KafkaOptionError("--kafka-option takes key=value, and one that was given has no key or no `=`")
        if is_secret(name):
            raise KafkaOptionError(
                f"{name} is a secret, which every user of this machine could see on the command line (ps): write it "
                "into a file that you alone may read (chmod 0400), and give that as --kafka-config FILE"
            )
        options[name] = value.strip()
    for name, value in options.items():
        if name in NOT_SETTABLE:
            raise KafkaOptionError(f"{name} cannot be set: {NOT_SETTABLE[name]}")
        if "\x00" in name + value:
            raise KafkaOptionError(f"{name!r} holds a NUL character, which no setting of Kafka's has")
    return options


def is_secret(name: str) -> bool:
    """True if the value of a setting must not be shown."""
    return HIDDEN.search(name) is not None


def check_options(spark: "SparkSession", bootstrap: str, options: Mapping[str, str]) -> None:
    """Have Kafka's own client check names and values, without connecting. Raises KafkaOptionError."""
    clients = spark._jvm.org.apache.kafka.clients  # type: ignore[union-attr]  # noqa: SLF001
    _check_names(
        options, {*clients.consumer.ConsumerConfig.configNames(), *clients.admin.AdminClientConfig.configNames()}
    )
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # noqa: PLC0415

    properties = client_properties(spark, bootstrap, options)
    for name in ("key.deserializer", "value.deserializer"):
        properties.put(name, "org.apache.kafka.common.serialization.ByteArrayDeserializer")
    try:
        clients.consumer.ConsumerConfig(properties)
    except Py4JJavaError as error:
        # Kafka hides passwords in these messages, but not a secret in another setting by mistake.
        words = str(error.java_exception.getMessage())
        culprits = [name for name in options if name in words]
        if any(is_secret(name) for name in culprits):
            words = "its value is none that Kafka takes"
        raise KafkaOptionError(f"Kafka's client does not take its settings: {without(options, words)}") from None


def without(options: Mapping[str, str], text: str) -> str:
    """Replace secrets in a text that Kafka's client wrote."""
    hidden = {value for name, value in options.items() if is_secret(name) and value}
    # Messages quote parts of a JAAS line; of a malformed line it may be any part.
    for jaas in [value for name, value in options.items() if "jaas" in name]:
        hidden |= {part for part in re.split(r'[\s"\'=;]+', jaas) if len(part) > 2 and not JAAS_WORD.search(part)}
    # The longest first: a secret may be a part of another.
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, "[hidden]")
    return text


def source_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for Spark's source, where Kafka's own have the prefix `kafka.`."""
    return {name if name in SPARK_OPTIONS else f"kafka.{name}": value for name, value in options.items()}


def client_properties(spark: "SparkSession", bootstrap: str, options: Mapping[str, str]) -> Any:
    """Return the settings as `java.util.Properties`, for Kafka's own client in Spark's JVM."""
    properties = spark._jvm.java.util.Properties()  # type: ignore[union-attr]  # noqa: SLF001
    for name, value in options.items():
        if name not in SPARK_OPTIONS:
            properties.put(name, value)
    properties.put("bootstrap.servers", bootstrap)
    return properties


def hide_secrets(spark: "SparkSession") -> None:
    """Have Spark hide secrets in its plans, its log, its user interface and its event log."""
    hidden = spark.conf.get(REDACTION) or ""
    if HIDDEN_NAMES not in hidden:
        # Names that are hidden already stay hidden. By Spark's default `url` is one.
        spark.conf.set(REDACTION, "|".join(filter(None, [hidden, f"(?i:{HIDDEN_NAMES})"])))


def _plain_name(name: str) -> str:
    return name.strip().removeprefix("kafka.")


def _check_names(options: Mapping[str, str], known: Collection[str]) -> None:
    if any(CLASS_NAMES.search(name) for name in options):
        return
    for name in options:
        if name not in known and name not in SPARK_OPTIONS:
            near = difflib.get_close_matches(name, [*known, *SPARK_OPTIONS], 1)
            hint = f"is {near[0]} meant?" if near else "Kafka's documentation lists them under Consumer Configs"
            raise KafkaOptionError(
                f"{name} is no setting of Kafka's client, which would pass it over in silence: {hint}"
            )


# -- the file -----------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, str]:
    """The settings in a file of Java properties. Raises KafkaOptionError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            # To open a named pipe would wait for its other end, for ever.
            raise KafkaOptionError(f"--kafka-config: {path} is no file")
        if status.st_size > CONFIG_BYTES_MAX:
            raise KafkaOptionError(
                f"--kafka-config: {path} has more than {CONFIG_BYTES_MAX} bytes: is it the right file?"
            )
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        # Not "from error": that error holds the file's text.
        raise KafkaOptionError(f"--kafka-config: {path} is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise KafkaOptionError(f"--kafka-config: {path} cannot be read: {error.strerror}") from error
    options = {_plain_name(name): value for name, value in properties(text)}
    secrets = [name for name, value in options.items() if is_secret(name) and value]
    if secrets and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KafkaOptionError(
            f"--kafka-config: {path} holds {secrets[0]} and can be read by others; run: chmod 0400 {path}"
        )
    return options


def properties(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of Java properties, as `java.util.Properties.load` does. Raises KafkaOptionError."""
    for number, line in _logical_lines(text):
        name, value = _divided(line)
        try:
            yield _unescaped(name), _unescaped(value)
        except ValueError:
            raise KafkaOptionError(
                f"--kafka-config: line {number} has a `\\u` without four hexadecimal digits"
            ) from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, without comments and blank lines. A backslash at the end joins two lines."""
    waiting: tuple[int, str] | None = None
    ended = re.sub(r"(?:\r\n|\r|\n)\Z", "", text)
    for number, physical in enumerate(re.split(r"\r\n|\r|\n", ended), start=1):
        line = physical.lstrip(" \t\f")
        begun, before = waiting or (number, "")
        if not before and (not line or line[0] in "#!"):
            # For Java, a backslash alone on its line begins nothing.
            waiting = None
            continue
        if (len(line) - len(line.rstrip("\\"))) % 2:
            waiting = (begun, before + line[:-1])
        else:
            waiting = None
            yield begun, before + line
    if waiting is not None:
        yield waiting


def _divided(line: str) -> tuple[str, str]:
    """The name and the value, still escaped, divided at the first `=`, `:` or space that no backslash precedes."""
    match = re.match(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)\Z", line, re.DOTALL)
    if match is None:
        return line, ""
    return match[1], match[2]


def _unescaped(text: str) -> str:
    """Raises ValueError if an escape lacks its four hexadecimal digits."""

    def plain(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        if match[2] == "u":
            raise ValueError(match[0])
        return ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", plain, text, flags=re.DOTALL)
