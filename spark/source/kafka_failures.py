"""Explains to a person those errors of Spark that Kafka caused."""

import re
from dataclasses import dataclass

CAUSES_MAX = 20
GO_ON = "Run `sluice-cloud ingest` with the same options and --go-on: it reads on from what there is"


@dataclass(frozen=True, slots=True)
class Failure:
    """A pattern of an error's text, and words that explain it. `{what}` in them is the pattern's group `what`."""

    pattern: str
    words: str


MADE_MEANWHILE = r"you must specify all TopicPartitions|OFFSET_DOES_NOT_MATCH_ASSIGNED"
FAILURES = (
    Failure(
        MADE_MEANWHILE,
        "topics or partitions were made or deleted just while the job began to read. Start it again.",
    ),
    Failure(
        r"Added partition (?P<what>\S+) starts from",
        "the first records of the new partition {what} were deleted before they were read (retention.ms, "
        f"retention.bytes). {GO_ON}, and records as lost what there is not.",
    ),
    Failure(
        r"(?:Partitions |Cannot find initial offsets for partitions )(?:Set\()?(?P<what>[\w., -]+?)\)?"
        r"(?: have been deleted|[.] They may have been deleted)",
        f"Kafka no longer has {{what}}, from which records were read: the topic was deleted. {GO_ON}, and records as "
        "lost what there is not.",
    ),
    Failure(
        r"sources? in the checkpoint|sources? requested by the query",
        "the checkpoint was made with backlog topics and this job has none, or the other way round. Start it as it was "
        f"before, or let it begin a new checkpoint. {GO_ON}.",
    ),
    Failure(
        r"Some data may have been lost because they are not available in Kafka|OffsetOutOfRangeException",
        "Kafka no longer has the records that are to be read next: its retention was shorter than the time this job "
        f"stood still or lay behind, or the topic was deleted and made anew. {GO_ON}, and records as lost what there "
        "is not. Set retention longer than the job may stand still.",
    ),
    Failure(
        r"GroupAuthorizationException(?:: Not authorized to access group: (?P<what>\S+))?",
        "Kafka does not allow this user to read in the consumer group {what}: the user needs READ on groups that begin "
        "with spark-kafka-source and spark-kafka-relation, or with what --kafka-option groupIdPrefix=... says.",
    ),
    Failure(
        r"TopicAuthorizationException(?:: (?:Not authorized to access topics|Topic authorization failed\S*): "
        r"\[(?P<what>[^\]]*)\])?",
        "Kafka does not allow this user to read the topics {what}: the user needs READ and DESCRIBE on them.",
    ),
    Failure(
        r"ClusterAuthorizationException",
        "Kafka does not allow this user what the job asks of the cluster: the user needs DESCRIBE on it.",
    ),
    Failure(
        r"java\.net\.UnknownHostException: (?P<what>[^\s:]+)",
        "the host {what}, which the settings of Kafka's client name, cannot be found: is it right there "
        "(sasl.oauthbearer.token.endpoint.url, say), and does DNS answer?",
    ),
    Failure(
        # Kafka's client writes the cause to its log alone.
        r"while retrieving token from callback handler",
        "no token could be had of the OAuth server: is sasl.oauthbearer.token.endpoint.url right, can its host be "
        "found and reached from here, and does it accept clientId and clientSecret?",
    ),
    Failure(
        r"in JAAS config|No LoginModule found",
        "sasl.jaas.config is not written as Kafka's client wants it, which is for a log-in by password: "
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="..." password="...";',
    ),
    Failure(
        r"SaslAuthenticationException|LoginException|IllegalSaslStateException|UnsupportedSaslMechanismException",
        "Kafka does not accept the log-in: see sasl.mechanism and sasl.jaas.config (user and password) in the file of "
        "--kafka-config.",
    ),
    Failure(
        r"SslAuthenticationException|SSLHandshakeException|CertificateException|CertPathValidatorException",
        "the TLS handshake with Kafka fails: see that ssl.truststore.location names the CA that signed the broker's "
        "certificate, that this is for the name in --bootstrap, and that ssl.keystore.location is set where the broker "
        "wants a certificate of its clients.",
    ),
    Failure(
        r"No resolvable bootstrap urls",
        "none of the names in --bootstrap can be resolved here: are they right, and does DNS answer?",
    ),
    Failure(
        r"UnknownTopicOrPartitionException|UnknownTopicIdException",
        f"a topic that was being read was deleted. {GO_ON}, and records as lost what there is not.",
    ),
    Failure(
        r"org\.apache\.kafka\.common\.errors\.(?:TimeoutException|DisconnectException|BrokerNotAvailableException)"
        r"|java\.util\.concurrent\.TimeoutException",
        "no broker answers: are --bootstrap and security.protocol right, is the broker up, and can the addresses that "
        "it gives as its own (advertised.listeners) be reached from here?",
    ),
)
"""Known failures. The first whose pattern is found counts."""


def is_passing(error: BaseException) -> bool:
    """Tell whether a new start will help, because topics were made or deleted just while the job began to read."""
    return re.search(MADE_MEANWHILE, told_by(error)) is not None


def explain_failure(error: BaseException) -> str | None:
    """Say what an error that Kafka caused means, and what to do; None if the cause is another.

    The words hold no secret: from the client's text they repeat only names of topics, groups and hosts.
    """
    text = told_by(error)
    for failure in FAILURES:
        found = re.search(failure.pattern, text)
        if found is not None:
            return failure.words.format(what=found.groupdict().get("what") or "(their names are in its log)")
    return None


def told_by(error: BaseException) -> str:
    """The texts of an error and of its causes, with the JVM's descriptions and stack traces."""
    texts: list[str] = []
    following: BaseException | None = error
    while following is not None and len(texts) < CAUSES_MAX:
        told = vars(following) if hasattr(following, "__dict__") else {}
        texts.append("\n".join([_said(following), *(str(told.get(name, "")) for name in ("_desc", "_stackTrace"))]))
        cause = told.get("_cause") or following.__cause__
        following = cause if isinstance(cause, BaseException) else None
    return "\n".join(texts)


def _said(error: BaseException) -> str:
    """An error's own text, or its type: PySpark asks the JVM for the text, which may have ended."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever that raises
        return type(error).__name__


def innermost(error: BaseException) -> str:
    """The line of the innermost cause in the JVM, or else the error's own first line."""
    told = [line for line in told_by(error).splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in told if re.match(r"Caused by: |: \S", line.strip())]
    return (causes[-1:] or told or [type(error).__name__])[0].strip()
