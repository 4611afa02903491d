"""Reads a damaged buffer file page by page, and sets it aside."""
