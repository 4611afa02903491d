"""Spark and Delta: session, staged files, warehouse folders."""
