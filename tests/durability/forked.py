"""A node whose mpsd is killed at a store operation that the test names."""

import os
from dataclasses import dataclass

from tests.node import Node


@dataclass
class ForkedNode(Node):
    """A node whose mpsd comes from a fork server, and may be told when to end itself."""

    kill_at: int = 0
    """The store operation before which the next mpsd ends itself, counted from 1; 0: none."""
    torn: bool = False
    """Whether that operation is half done then."""

    def launch(self) -> None:
        """Start mpsd and do not wait for anything."""
        assert self.fork_server is not None
        fate = {"kill_at": self.kill_at, "torn": self.torn} if self.kill_at else {}
        variables = {**os.environ, **self.env}
        self.process = self.fork_server.start(self.command[3:], self.stderr, variables, **fate)  # type: ignore[assignment]
