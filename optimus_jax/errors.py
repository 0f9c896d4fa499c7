"""Errors that are the user's to mend."""


class UserError(Exception):
    """A mistake that the user can mend; the message says how. Shown without a traceback."""
