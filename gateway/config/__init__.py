"""Reads `gateway.toml` and reports each mistake with its line."""
