"""Devices as operators see them: list, notes, words."""
