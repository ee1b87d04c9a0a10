"""Notifications between parts of mpsd that do not know each other.

A part announces a change by a signal of its own, typed by the facts that the signal carries. The part that owns both
sides connects a listener to it, in its constructor: what hears a signal is read there, and nowhere else.
"""

from collections.abc import Callable
from typing import Generic, TypeVarTuple

Facts = TypeVarTuple("Facts")


class Signal(Generic[*Facts]):
    """One notification of one part, and its listeners."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[*Facts], object]] = []

    def connect(self, listener: Callable[[*Facts], object]) -> None:
        """Have `listener` called at each `send` from now on, after the listeners before it."""
        self._listeners.append(listener)

    def send(self, *facts: *Facts) -> None:
        """Call each listener, in order of connection, before this returns. What a listener raises is raised here."""
        for listener in self._listeners:
            listener(*facts)
