"""Asks the questions of `sluice setup`, at most eight, and checks each answer before the next question."""

import errno
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

import click
import msgspec

from gateway.commands.check.finding import Finding
from gateway.commands.setup.answers import (
    ANONYMOUS_WORDS,
    PASSWORD_LENGTH_MIN,
    Answers,
    GatewayAnswers,
    KafkaAnswers,
    Secrets,
    SensorsAnswers,
    ServiceAnswers,
    StatusPageAnswers,
)
from gateway.commands.setup.hardware import is_clock_synced, ports, proposed_id, virtualization
from gateway.commands.setup.kafka_trial import IN_QUESTIONS, NONE, Broker, best_mechanism, look_at, try_settings
from gateway.commands.setup.new_settings import LISTENER_PORT, Existing, make
from gateway.config import config_file
from gateway.host.terminal import ask, say
from gateway.host.terminal_text import counted, escaped, hanging
from gateway.listener import credentials
from gateway.listener.credentials import CredentialsError
from gateway.record_contract import DEVICE_NAME, NAME_RULE
from gateway.serial_lines.ports import ALL, names_of
from gateway.settings import GatewaySettings, ListenerSettings, Settings
from gateway.tls.certificates import CertificateFileError, read_certificates
from gateway.toml_files.mistakes import ConfigError

QUESTIONS_MAX: Final = 8
LATER: Final = "later"
_NO_SITE: Final = "default"
_PLAIN_PORT: Final = 9092
"""Usual port of Kafka without TLS. It decides what is proposed if Kafka cannot be reached."""
_TLS: Final = "tls://"
_PLAIN: Final = "plain://"
_YES: Final = frozenset({"y", "yes"})
_NO: Final = frozenset({"n", "no"})
_NAMED_MAX: Final = 10
_T = TypeVar("_T")


class AnswerError(Exception):
    """An answer will not do. The message says why, and what to write."""


@dataclass(frozen=True, slots=True)
class Told:
    """Result of the questions."""

    answers: Answers
    ca: bytes | None
    accepted: tuple[str, ...]
    """Troubles that the person was told of, and kept anyway."""


def tell(text: str, indent: int = 0) -> None:
    """Print a text for the person at the terminal, wrapped."""
    say(hanging(" " * indent + text, indent))


def _printable(answer: str) -> str:
    if not answer.isprintable():
        raise AnswerError("The answer has a character that cannot be seen (an arrow key?). Write it again.")
    return answer


def _unquoted(answer: str) -> str:
    """Remove quotes, which people copy from the question."""
    return answer.strip().strip("\"'").strip()


def _word(answer: str) -> str:
    """Normalise an answer that may be a word such as "none", in any case."""
    return _unquoted(answer).lower()


def _parts(answer: str) -> tuple[str, ...]:
    """Split an answer at commas, and drop repeated parts."""
    return tuple(dict.fromkeys(part for part in map(_unquoted, answer.split(",")) if part))


def _confirmed(question: str, *, proposal: bool = False) -> bool:
    default, shown = ("y", "[Y/n]") if proposal else ("n", "[y/N]")
    while True:
        answer = ask(f"     {question} {shown}", default=default, show_default=False, prompt_suffix=": ")
        if _word(answer) in _YES | _NO:
            return _word(answer) in _YES
        tell("Type y or n.", 5)


def _sentence(words: str) -> str:
    return words if words.endswith(("?", ".")) else f"{words}."


class Dialogue:
    """One run of the questions."""

    def __init__(self, config: Path, existing: Existing, *, can_start: bool) -> None:
        self._config = config
        self._existing = existing
        self._can_start = can_start
        self._asked = 0
        self._accepted: list[str] = []
        self._is_reached = True
        self._ca: bytes | None = None

    def run(self) -> Told:
        """Ask all questions. Raises click.Abort if the person ends the dialogue: then nothing is written."""
        gateway_id, namespace = self._identity()
        kafka, password = self._kafka(gateway_id, namespace)
        serial = self._serial()
        sensors = self._mqtt(serial)
        page, page_password = self._page()
        answers = Answers(
            kafka=kafka,
            gateway=GatewayAnswers(gateway_id, namespace, self._clock()),
            sensors=sensors,
            status_page=StatusPageAnswers(enabled=page),
            secrets=Secrets(kafka_password=password, page_password=page_password),
        )
        start = self._last(answers)
        answers = msgspec.structs.replace(answers, service=ServiceAnswers(start=start))
        return Told(answers, self._ca, tuple(self._accepted))

    # -- asking -----------------------------------------------------------------------------------

    def _ask(  # noqa: PLR0913 - what a question is made of
        self,
        heading: str,
        words: str,
        judge: Callable[[str], _T],
        *,
        proposal: str = "",
        proposal_shown: str | None = None,
        is_secret: bool = False,
    ) -> _T:
        """Ask until `judge` takes the answer. Enter takes the proposal."""
        self._asked += 1
        say()
        tell(f"Question {self._asked}: {heading}")
        tell(words, 5)
        while True:
            shown = proposal if proposal_shown is None else proposal_shown
            prompt = f"     [{shown}]" if shown else "    "
            answer = ask(
                prompt, default=proposal, show_default=False, hide_input=is_secret, prompt_suffix=" > ", err=False
            )
            try:
                return judge(_printable(answer if is_secret else answer.strip()))
            except AnswerError as error:
                tell(str(error), 5)

    def _keep_anyway(self, words: str) -> bool:
        tell(words, 5)
        kept = _confirmed("Keep this answer anyway?")
        if kept:
            self._accepted.append(words)
        return kept

    # -- the questions ----------------------------------------------------------------------------

    def _identity(self) -> tuple[str, str]:
        settings = self._existing.settings
        proposal = (
            f"{_NO_SITE}/{proposed_id()}" if settings is None else f"{settings.gateway.namespace}/{settings.gateway.id}"
        )

        def judge(answer: str) -> tuple[str, str]:
            site, slash, name = _unquoted(answer).rpartition("/")
            site = site if slash else proposal.partition("/")[0]
            for part in (site, name):
                if DEVICE_NAME.fullmatch(part) is None:
                    raise AnswerError(
                        f"{escaped(part[:80])!r} will not do: site and name have {NAME_RULE} each, as in "
                        "north-farm/barn-1"
                    )
            if not slash and not _confirmed(f"No site was given: is it {site}/{name}?"):
                raise AnswerError("Write SITE/NAME, as in north-farm/barn-1.")
            if site == _NO_SITE:
                tell(f'The site is called "{site}": fine, as long as no second site sends to this Kafka.', 5)
            return name, site

        return self._ask(
            "What is this gateway called?",
            "SITE/NAME, as in north-farm/barn-1. The site keeps two sites' sensor 42 apart, the name tells the site's "
            "gateways apart. Readings keep both for ever. Enter takes the answer in brackets, here and below.",
            judge,
            proposal=proposal,
        )

    def _kafka(self, gateway_id: str, namespace: str) -> tuple[KafkaAnswers, str | None]:
        settings = self._existing.settings
        proposal = ""
        if settings is not None:
            way = _TLS if settings.kafka.tls is not None else _PLAIN
            proposal = ", ".join(way + address for address in settings.kafka.bootstrap)
        brokers, tls = self._ask(
            "Where is Kafka?",
            "Its brokers as host:port, several with commas between, as in kafka.example:9093. You are asked whether "
            "they speak TLS only if they cannot be reached from here.",
            self._addresses,
            proposal=proposal,
        )
        create_topics = True if settings is None else settings.kafka.create_topics
        answers = KafkaAnswers(tuple(broker.address for broker in brokers), tls, create_topics=create_topics)
        gateway = GatewayAnswers(gateway_id, namespace)
        wants_none = any(broker.mechanisms == () for broker in brokers)
        if wants_none and self._try(Answers(answers, gateway), None):
            return answers, None
        return self._log_in(answers, gateway, brokers)

    def _addresses(self, answer: str) -> tuple[list[Broker], bool]:
        ways = {part.partition("://")[0] for part in re.split(r"[,\s]+", answer) if "://" in part}
        if ways - {"tls", "plain"} or len(ways) > 1:
            raise AnswerError("Write before an address tls://, plain:// or nothing, and before all addresses the same.")
        addresses = [part.rpartition("://")[2] for part in re.split(r"[,\s]+", answer) if part]
        try:
            settings = config_file.parse(
                _SKETCH.format(addresses=msgspec.json.encode(addresses).decode()), self._config
            )
        except ConfigError as error:
            raise AnswerError("; ".join(mistake.message.partition(": ")[2] for mistake in error.mistakes)) from None
        brokers = look_at(settings.kafka.bootstrap)
        reached = [broker for broker in brokers if not broker.trouble]
        for broker in brokers:
            if broker.trouble and reached:
                trouble = escaped(broker.trouble)
                tell(f"{_sentence(trouble)} It is kept: others answer.", 5)
                self._accepted.append(trouble)
        if not reached:
            self._is_reached = self._keep_unreached(brokers)
        tls = any(broker.tls for broker in reached)
        if reached and ways and tls != (ways == {"tls"}):
            raise AnswerError(
                f"The brokers speak {'TLS' if tls else 'no TLS'}: write the addresses without tls:// or plain://."
            )
        if ways:
            tls = ways == {"tls"}
        elif not reached:
            tls = _confirmed("Does it speak TLS?", proposal=self._tls_proposed(settings.kafka.bootstrap))
        said = "TLS" if tls else "no TLS: readings can be read on the way"
        tell(f"Reached: it speaks {said}." if reached else f"Not reached; assumed to speak {said}.", 5)
        return brokers, tls

    def _tls_proposed(self, addresses: Sequence[str]) -> bool:
        """Propose TLS or not for brokers that cannot be reached: by the settings in place, else by the port."""
        settings = self._existing.settings
        if settings is not None and {*addresses} & {*settings.kafka.bootstrap}:
            return settings.kafka.tls is not None
        return not all(address.endswith(f":{_PLAIN_PORT}") for address in addresses)

    def _keep_unreached(self, brokers: Sequence[Broker]) -> bool:
        """Ask whether to keep unreachable addresses. Returns False; raises AnswerError if they are not kept."""
        words = " ".join(_sentence(broker.trouble) for broker in brokers)
        if all(broker.is_offline for broker in brokers):
            words += " Without a network here, that is to be expected."
        if not self._keep_anyway(f"Kafka is not reached: {words} Readings wait on this box until it is."):
            raise AnswerError("Write the address again.")
        return False

    def _log_in(
        self, answers: KafkaAnswers, gateway: GatewayAnswers, brokers: Sequence[Broker]
    ) -> tuple[KafkaAnswers, str | None]:
        settings = self._existing.settings
        sasl = None if settings is None else settings.kafka.sasl
        offered = best_mechanism(brokers, tls=answers.tls)
        words = f'As which user does this gateway log in? "{NONE}": Kafka wants no log-in.'
        if offered is not None:
            words = f"Kafka wants a log-in ({offered}). As which user?"

        def user_of(answer: str) -> str | None:
            if answer and _word(answer) != NONE:
                return answer
            if not answer or not self._try(Answers(answers, gateway), None):
                raise AnswerError(f'Write the user\'s name, or "{NONE}".')
            return None

        proposal = sasl.user if sasl is not None else "" if offered is not None else NONE
        user = self._ask("Kafka's log-in: the user", words, user_of, proposal=proposal)
        if user is None:
            return answers, None
        mechanism = offered or ("SCRAM-SHA-512" if sasl is None else sasl.mechanism)
        if mechanism == "PLAIN" and not answers.tls:
            # PLAIN without TLS would send the password in the clear, so the settings refuse it.
            mechanism = "SCRAM-SHA-512"
        answers = msgspec.structs.replace(answers, user=user, mechanism=mechanism)
        return answers, self._password(answers, gateway, user)

    def _password(self, answers: KafkaAnswers, gateway: GatewayAnswers, user: str) -> str | None:
        """Ask for the password. None keeps the password in place."""
        in_place = self._existing.kafka_password(user)

        def password_of(answer: str) -> str | None:
            password = answer or in_place
            if not password:
                raise AnswerError("Write the password; nothing is shown as you type.")
            if not self._try(Answers(answers, gateway), password):
                raise AnswerError("Write the password again. Ctrl-C ends without writing anything.")
            return answer or None

        return self._ask(
            "Kafka's log-in: the password",
            f"Of user {escaped(user)}. Nothing is shown as you type. It is kept in a file of its own.",
            password_of,
            proposal_shown="the one in place" if in_place is not None else None,
            is_secret=True,
        )

    def _try(self, answers: Answers, password: str | None) -> bool:
        """Tell whether Kafka takes these answers, or the person keeps them anyway."""
        if not self._is_reached:
            return True
        while True:
            first, *others = self._findings(answers, password)
            if first.ok:
                tell(_sentence(escaped(f"{first.subject} {first.words}")), 5)
                to_be_mended = [escaped(f"{each.subject}: {each.words}") for each in others if not each.ok]
                for words in to_be_mended:
                    tell(f"To be corrected: {words}", 5)
                self._accepted += to_be_mended
                return True
            if answers.kafka.tls and "signed by nobody" in first.words and self._ask_for_ca(escaped(first.words)):
                continue
            return self._keep_anyway(_sentence(escaped(f"{first.subject} {first.words}")))

    def _findings(self, answers: Answers, password: str | None) -> list[Finding]:
        settings = self._candidate(answers, password)
        return try_settings(settings, IN_QUESTIONS, password=password, ca=self._ca)

    def _candidate(self, answers: Answers, password: str | None) -> Settings:
        secrets = Secrets(kafka_password=password)
        sensors = SensorsAnswers(mqtt=False)
        tried = msgspec.structs.replace(answers, secrets=secrets, sensors=sensors)
        return make(self._config, self._existing, tried, gateway_id=answers.gateway.id or "gateway").settings

    def _ask_for_ca(self, trouble: str) -> bool:
        """Ask for the authority's certificate. This does not count as one of the eight questions."""
        tell(trouble, 5)
        while True:
            answer = ask(
                "     Path of the authority's certificate (PEM), or Enter for none",
                default="",
                show_default=False,
                prompt_suffix=" > ",
            ).strip()
            if not answer:
                return False
            try:
                path = Path(answer).expanduser()
                read_certificates(path)
                self._ca = path.read_bytes()
            except (CertificateFileError, RuntimeError, ValueError) as error:
                # RuntimeError: `~user` does not exist. ValueError: the path has a NUL.
                tell(escaped(str(error)), 5)
            except OSError as error:
                tell(f"{path}: {error.strerror}", 5)
            else:
                return True

    def _serial(self) -> tuple[str, ...]:
        settings = self._existing.settings
        old = ("all",) if settings is None else settings.serial.ports if settings.serial is not None else ()
        seen = ports()
        told = "; ".join(f"{port.name}: {escaped(port.what)}" for port in seen)

        def judge(answer: str) -> tuple[str, ...]:
            if _word(answer) == NONE:
                return ()
            if _word(answer) == ALL:
                return (ALL,)
            names = _parts(answer)
            for name in names:
                if not name.startswith("/dev/"):
                    raise AnswerError(
                        f'{escaped(name[:80])!r} is no port: write "{ALL}", "{NONE}", or paths below /dev/ with '
                        "commas between"
                    )
                if not names_of(name) and not self._keep_anyway(f"{escaped(name[:80])} is not there now."):
                    raise AnswerError("Write the ports again.")
            return names

        return self._ask(
            "Which serial ports have sensors?",
            f'"{ALL}": every USB adapter, now and later; "{NONE}"; or paths with commas between. '
            + (f"Seen now: {told}" if told else "None is seen now; adapters that are plugged in later are read too."),
            judge,
            proposal=", ".join(old) or NONE,
        )

    def _mqtt(self, serial: tuple[str, ...]) -> SensorsAnswers:
        settings = self._existing.settings
        listener = None if settings is None else settings.mqtt_listener
        proposal = LATER if settings is None or listener is not None else NONE
        if listener is not None and listener.anonymous:
            proposal = ANONYMOUS_WORDS

        known = self._with_secrets()

        def judge(answer: str) -> SensorsAnswers:
            word = _word(answer)
            if word == NONE:
                return SensorsAnswers(serial, mqtt=False)
            if word in {LATER, ANONYMOUS_WORDS}:
                self._port_free(listener)
                return SensorsAnswers(serial, anonymous=ANONYMOUS_WORDS if word == ANONYMOUS_WORDS else None)
            if word.partition(" ")[0] == ANONYMOUS_WORDS.partition(" ")[0]:
                raise AnswerError(f"That is not the whole sentence. Write {ANONYMOUS_WORDS}, or names.")
            names = _parts(answer)
            for name in names:
                if DEVICE_NAME.fullmatch(name) is None:
                    raise AnswerError(
                        f"{escaped(name[:80])!r} is no device name: write {NAME_RULE}; commas between names"
                    )
            if not names or {LATER, NONE} & {name.lower() for name in names}:
                raise AnswerError(f'Write names, or "{LATER}", or "{NONE}".')
            tell(f"{counted(len(names), 'sensor')}: {', '.join(names)}.", 5)
            self._port_free(listener)
            return SensorsAnswers(serial, devices=names)

        have = f"{_listed(known)} {'has' if len(known) == 1 else 'have'} a secret already, and keep it. "
        return self._ask(
            "Which sensors connect by MQTT?",
            (f"{have}Names of more," if known else "Their names,")
            + " with commas between: each gets a secret of its own, shown at the end. "
            f'"{LATER}": {"no more now" if known else "they come later"} (sluice devices add NAME); "{NONE}": no MQTT '
            f"here. If your sensors have no secrets at all, write this whole sentence: {ANONYMOUS_WORDS}",
            judge,
            proposal=proposal,
        )

    def _with_secrets(self) -> list[str]:
        """Devices that have a secret already."""
        settings = self._existing.settings
        if settings is None:
            return []
        listener = settings.mqtt_listener
        known = {*(listener.users if listener is not None else ())}
        # A file that cannot be read is reported later, when it must be changed.
        with suppress(CredentialsError):
            known |= {*credentials.load(credentials.file_of(settings)).devices}
        return sorted(known)

    def _port_free(self, listener: ListenerSettings | None) -> None:
        """Warn if another program has the listener's port. A listener in place would be this gateway's own."""
        if listener is not None:
            return
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", LISTENER_PORT))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    words = (
                        f"Another program has port {LISTENER_PORT} (mosquitto? ss -ltnp tells): stop it, or change "
                        "mqtt_listener.port in the settings afterwards."
                    )
                    self._accepted.append(words)
                    tell(words, 5)

    def _page(self) -> tuple[bool, str | None]:
        """Ask whether there is a status page, and for its password. None keeps or makes a password."""
        in_place = self._existing.page_password is not None

        def judge(answer: str) -> tuple[bool, str | None]:
            if _word(answer) == NONE:
                return False, None
            if not answer:
                return True, None
            if not PASSWORD_LENGTH_MIN <= len(answer) <= 256:
                raise AnswerError(f"A password has at least {PASSWORD_LENGTH_MIN} characters, and 256 at most.")
            again = ask("     again", default="", show_default=False, hide_input=True, prompt_suffix=" > ")
            if again != answer:
                raise AnswerError("These are two different passwords. Write it once more.")
            return True, answer

        return self._ask(
            "The status page's password",
            "With it, people on this network see in a browser how the gateway is. Nothing is shown as you type; at "
            f'least {PASSWORD_LENGTH_MIN} characters. "{NONE}": no status page.',
            judge,
            proposal_shown="the one in place" if in_place else "a new one, shown once at the end",
            is_secret=True,
        )

    def _clock(self) -> Literal["system"] | None:
        """Offer the host's clock to a container whose clock is not synced. None keeps the setting in place.

        Few boxes are containers, so this does not count as one of the eight questions.
        """
        settings = self._existing.settings
        gateway = GatewaySettings("gateway") if settings is None else settings.gateway
        inside = virtualization()
        if gateway.clock != "kernel" or not inside.startswith("container") or is_clock_synced(gateway):
            return None
        say()
        tell(f"This is a {inside}, and the kernel says that its clock is not synced: readings would wait for it.", 5)
        return "system" if _confirmed('Does its host keep the clock right (clock = "system")?') else None

    def _last(self, answers: Answers) -> bool:
        """Show the answers, and ask whether to write them. Tell whether to start the gateway."""
        say()
        tell("This is going to be written:")
        for what, told in self._summary(answers):
            say(hanging(f"     {what:<8} {told}", 14))

        def judge(answer: str) -> bool:
            if _word(answer) in _YES | _NO:
                return _word(answer) in _YES
            raise AnswerError("Write yes or no.")

        if self._can_start:
            return self._ask(
                "Start the gateway now, and at every boot?",
                "yes: systemctl enable --now sluice; a running gateway is restarted with the new settings. no: they "
                "are only written. Ctrl-C: nothing is written.",
                judge,
                proposal="yes",
            )
        if not self._ask("Write this?", "no, and Ctrl-C: nothing is written.", judge, proposal="yes"):
            raise click.Abort
        return False

    def _summary(self, answers: Answers) -> Iterator[tuple[str, str]]:
        kafka, sensors = answers.kafka, answers.sensors
        yield "gateway", f"{answers.gateway.namespace}/{answers.gateway.id}"
        if answers.gateway.clock is not None:
            yield "clock", "the system's, which the host of this container keeps"
        way = "with TLS" if kafka.tls else "without TLS"
        user = f"user {escaped(kafka.user)}" if kafka.user is not None else "no log-in"
        reached = "" if self._is_reached else "; NOT REACHED"
        yield "Kafka", f"{', '.join(kafka.bootstrap)}, {way}, {user}{reached}"
        if not sensors.mqtt:
            mqtt = NONE
        elif sensors.anonymous is not None:
            mqtt = sensors.anonymous
        else:
            mqtt = _listed(sorted({*sensors.devices, *self._with_secrets()})) or LATER
        if self._has_source(sensors):
            yield "sensors", f"by MQTT: {mqtt}; by serial port: {', '.join(sensors.serial) or NONE}"
        else:
            yield "sensors", "nothing comes in: neither by MQTT nor by serial port"
        yield "page", "with a password" if answers.status_page.enabled else NONE

    def _has_source(self, sensors: SensorsAnswers) -> bool:
        """Tell whether readings have a source, in the answers or in settings in place that are not asked for."""
        settings = self._existing.settings
        if sensors.mqtt or sensors.serial or settings is None:
            return sensors.mqtt or bool(sensors.serial)
        serial = None if settings.serial is None else msgspec.structs.replace(settings.serial, ports=())
        return msgspec.structs.replace(settings, mqtt_listener=None, serial=serial).has_source


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")


_SKETCH: Final = """\
[gateway]
id = "gateway"
[kafka]
bootstrap = {addresses}
"""
