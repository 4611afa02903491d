"""The way to Kafka: order of rows, rounds, quota, heartbeat, redrive."""
