"""The way down: commands from Kafka to devices."""
