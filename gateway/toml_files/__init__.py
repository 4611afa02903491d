"""TOML files: schemas, mistakes with their lines, writing, editing."""
