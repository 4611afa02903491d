"""TLS: certificates, client contexts, dates while the clock is unknown."""
