"""The gateway's health: gathers facts and finds conditions, each with a stable code."""
