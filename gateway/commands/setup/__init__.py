"""`sluice setup`, `provision` and `reset`."""
