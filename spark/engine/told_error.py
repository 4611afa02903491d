"""The base of errors that a command prints as they are."""


class ToldError(Exception):
    """An error whose message says to a person what is wrong and, if anything can be done, what to do."""

    is_usage = False
    """True if the command was called wrongly."""
