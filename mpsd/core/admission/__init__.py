"""What each GPU has to give, who holds how much of it, and who waits in which order.

`daemon/leases` and `daemon/node` call it.
"""
