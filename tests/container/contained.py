"""A program in a container of any engine, for tests: it takes commands, and ends with its container."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from tests.driven_program import DrivenProgram


class Engine(Protocol):
    """A container engine: podman, containerd or Docker."""

    environment: Mapping[str, str]

    def remove(self, name: str) -> None:
        """Remove a container at once, with all its processes, if it exists."""


class Contained(DrivenProgram):
    """A process in a container that takes commands; it ends with its container, not with the command alone."""

    def __init__(self, engine: Engine, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._engine = engine
        super().__init__(command, engine.environment)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.remove(self.name)
        super().__exit__(kind, error, trace)
