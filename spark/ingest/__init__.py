"""State and checks of a batch beside the log."""
