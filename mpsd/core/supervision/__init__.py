"""Decisions about control daemons: the restart after a death, the steps of a drain or restart, and wedged servers."""
