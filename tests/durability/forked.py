"""A node whose mpsd is killed at a chosen store operation."""

import os
from dataclasses import dataclass

from tests.node import Node


@dataclass
class ForkedNode(Node):
    """A node whose mpsd is forked by a fork server, and can be set to kill itself at a given moment."""

    kill_at: int = 0
    """The store operation before which the next mpsd kills itself, counted from 1; 0 means none."""
    torn: bool = False
    """Whether that operation is then half done; a rename is then whole."""
    of_ends: bool = False
    """Whether the operations on ends of clients count, and no others."""

    def launch(self) -> None:
        """Start mpsd, without waiting."""
        assert self.fork_server is not None
        fate = {"kill_at": self.kill_at, "torn": self.torn, "of_ends": self.of_ends} if self.kill_at else {}
        variables = {**os.environ, **self.env}
        self.process = self.fork_server.start(self.command[3:], self.stderr, variables, fate=fate)  # type: ignore[assignment]
