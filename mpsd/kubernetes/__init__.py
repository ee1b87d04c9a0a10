"""`mpsd-kubernetes`: kubelet's device plugin, and at the same time a client of mpsd's API.

It uses threads and no event loop: gRPC's server has its own threads, and mpsd's client blocks until the answer. It is a
separate program with its own libraries (the extra `kubernetes`), and the service does not depend on it.
"""
