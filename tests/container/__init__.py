"""Containers of real engines, for tests of the image and of clients in containers, as root."""
