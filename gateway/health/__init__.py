"""The gateway's health: facts in, conditions out, each with a stable code."""
