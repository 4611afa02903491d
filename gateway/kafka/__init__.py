"""The Kafka client: connections, sessions, topics, records, batches."""
