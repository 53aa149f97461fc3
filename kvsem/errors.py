"""Errors at the boundary: one line that names the field, the value and what would be right."""

from math import inf


class KvsemError(Exception):
    """Anything that a user can put right; experiments print it as one line and exit with 2."""


class SettingError(KvsemError):
    """A setting is unknown or outside its range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={value!r}: expected {allowed}")


class DataError(KvsemError):
    """A file or record of the user's cannot be read."""


class ModelError(KvsemError):
    """A model is missing, incomplete, or asked for what it cannot do."""


def is_number(value: object) -> bool:
    """Whether it is a finite real number; neither true nor false is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise `SettingError` unless ``value`` is a number and ``low <= value <= high``."""
    if not (is_number(value) and low <= value <= high):
        raise SettingError(field, value, f"a number from {low} to {high}")


def check_count(field: str, value: int, at_least: int, at_most: float = inf) -> None:
    """Raise `SettingError` unless ``value`` is a whole number in the range, both ends included."""
    if type(value) is not int or not at_least <= value <= at_most:
        end = "" if at_most == inf else f" to {at_most}"
        raise SettingError(field, value, f"a whole number from {at_least}{end}")


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
