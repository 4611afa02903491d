"""`sluice status`."""
