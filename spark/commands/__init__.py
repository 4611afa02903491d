"""The `sluice-cloud` commands."""
