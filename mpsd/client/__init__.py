"""The client of mpsd's API: what mpsctl, mpsd-kubernetes and other Python programs on the node call mpsd with.

    import os
    from mpsd.client import Client

    with Client() as api:
        lease = api.admit({"threads": 25, "memory": "2GiB"})  # this process holds it until it exits
        os.environ.update(lease["env"])  # before CUDA is initialised
        assert api.verify(lease["id"])["violations"] == []
        api.release(lease["id"])

An answer is mpsd's JSON as Python decodes it, with the types of `answer_types`; requests have the fields that
docs/reference/api.md describes. Every method raises UnreachableError when no mpsd answers within the deadline,
UntrustedSocketError when a stranger listens on the socket, and otherwise the error of mpsd's answer, as its class in
`mpsd.core.errors` with a hint. The calls block, and many threads may share a Client; `mpsd.AsyncClient` has the same
methods for asyncio.
"""

from mpsd.client.client import Client

__all__ = ["Client"]
