"""Sockets: those that mpsd listens on, and who is at the other end."""
