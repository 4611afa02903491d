"""Decides whether a window is final: heartbeats, losses, gaps."""
