"""The `sluice` commands."""
