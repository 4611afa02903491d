"""Answers from the tables without Java: deltalake and DuckDB."""
