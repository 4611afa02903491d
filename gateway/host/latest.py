"""A dictionary that is bounded because it forgets."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(dict[Key, Value]):
    """The `most` keys that were set last, the latest one last; earlier ones are forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
