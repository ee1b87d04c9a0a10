"""`mpsd-kubernetes`: kubelet's device plugin on the one side, a client of mpsd's API on the other.

It has threads and no event loop: gRPC's server has threads of its own, and mpsd's client waits for its answers.
It is a program of its own, with libraries of its own (`mpsd[kubernetes]`), and the service knows nothing of it.

Imported by: by name, as the program that pyproject.toml has.
"""
