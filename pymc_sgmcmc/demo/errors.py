"""The error for what a user of the command line can put right."""

from __future__ import annotations


class InputError(ValueError):
    """What was asked for cannot be done; the message is one line that says what to change."""
