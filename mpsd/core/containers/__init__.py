"""Containers in the terms of their runtimes: the CDI device of a lease, and what a hook learns of a container."""
