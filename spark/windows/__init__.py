"""The table of windows and its changes."""
