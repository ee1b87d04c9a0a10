"""The driver of Dynamic Resource Allocation: it publishes this node's GPUs, and prepares claims by leases of mpsd.

It is `mpsd-kubernetes --dra`, in the place of the device plugin: a node offers its GPUs by one of both.

Imported by: kubernetes, by name: it imports that room.
"""
