"""Errors at the boundary: one line that names the field, the value and what would be right."""


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


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise `SettingError` unless ``low <= value <= high`` (NaN is outside)."""
    if not low <= value <= high:
        raise SettingError(field, value, f"a number from {low} to {high}")


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
