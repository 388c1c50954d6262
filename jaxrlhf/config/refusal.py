"""The error for input that its giver can mend."""


class Refusal(ValueError):
    """Input that does not fit: settings, data, a checkpoint, devices.

    Its message says what was given, what was expected and what to do. Commands print that one line in place of a
    traceback, so raise it in code of your own only where the message says it all.
    """


def require(condition: bool, message: str) -> None:
    """Raise `Refusal(message)` unless `condition` holds."""
    if not condition:
        raise Refusal(message)
