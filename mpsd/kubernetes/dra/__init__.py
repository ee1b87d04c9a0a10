"""The driver of Dynamic Resource Allocation: it publishes this node's GPUs, and prepares claims through leases of mpsd.

It is `mpsd-kubernetes --dra`, and replaces the device plugin: a node offers its GPUs by one of the two.
"""
