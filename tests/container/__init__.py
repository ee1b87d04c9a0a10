"""Containers of a real engine, for tests of the image and of clients in containers: podman and runc, as root."""
