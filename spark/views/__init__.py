"""The views that analysts open."""
