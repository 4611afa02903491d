"""Kafka as a source: topics, offsets, failures in words."""
