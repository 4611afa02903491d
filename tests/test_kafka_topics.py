"""What a broker's answer about a topic means: a lasting no, or only that it cannot say just now."""

import pytest
from aiokafka.errors import KafkaError

from gateway.kafka_topics import _creation_verdict, _judge

REQUEST_TIMED_OUT = 7
UNKNOWN_TOPIC = 3
TOPIC_AUTHORIZATION_FAILED = 29
TOPIC_ALREADY_EXISTS = 36
INVALID_REPLICATION_FACTOR = 38


def test_a_topic_that_stamps_records_itself_is_usable() -> None:
    assert _judge("t", 0, None, {"message.timestamp.type": "LogAppendTime"}).usable
    verdict = _judge("t", 0, None, {"message.timestamp.type": "CreateTime"})
    assert verdict.reason == "topic-not-logappendtime"


def test_a_lasting_no_is_a_verdict() -> None:
    assert _judge("t", TOPIC_AUTHORIZATION_FAILED, "no", {}).reason == "topic-refused"
    assert _judge("t", UNKNOWN_TOPIC, None, {}).reason == "topic-unknown"
    assert _creation_verdict("t", TOPIC_ALREADY_EXISTS, []).usable


@pytest.mark.parametrize("code", [REQUEST_TIMED_OUT, INVALID_REPLICATION_FACTOR, -1])
def test_trouble_in_the_cluster_sends_nothing_to_the_quarantine(code: int) -> None:
    with pytest.raises(KafkaError):
        _judge("t", code, None, {})
    with pytest.raises(KafkaError):
        _creation_verdict("t", code, ["not now"])
