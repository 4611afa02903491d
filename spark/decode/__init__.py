"""Kafka records to typed columns, payloads to exact metrics."""
