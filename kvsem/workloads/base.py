"""A workload is a list of requests that can be iterated again."""

from collections.abc import Iterator
from typing import Protocol

from kvsem.types import Request


class Workload(Protocol):
    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...
