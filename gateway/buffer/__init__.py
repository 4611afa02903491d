"""The buffer: one SQLite file, written by one thread."""
