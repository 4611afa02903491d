"""TOML files: mistakes with their lines, writing, editing."""
