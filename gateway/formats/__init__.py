"""Formats: cut the bytes of a serial sensor into pieces, and make readings of them."""
