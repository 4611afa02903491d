"""The ingest job as a service: what monitoring and systemd learn of it."""
