"""The way to Kafka: order of rows, rounds, echoes in further topics, quota, heartbeat, redrive."""
