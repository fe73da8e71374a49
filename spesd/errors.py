"""The error tree. Only `cli` turns these into text; nothing else prints an error.

An error's message is one sentence that says what is wrong, then what to do about it. Our own
bugs are not in this tree: they raise `AssertionError` and the like, and are meant to be loud.
"""


class SpesdError(Exception):
    """The base: the command failed, exit code 1."""

    exit_code = 1


class UsageError(SpesdError):
    """The user asked for something that cannot be: exit code 2."""

    exit_code = 2


class ConfigError(UsageError):
    """A run config, peer config or profile that cannot be accepted."""


class Unavailable(SpesdError):
    """The world does not provide it now: nobody answers, no disk space, no such device."""


class DamagedState(SpesdError):
    """Bytes on this disk are not what was written; nothing was loaded from them."""


class ProtocolViolation(SpesdError):
    """Another peer's fault: its message is dropped and counted, and we go on."""
