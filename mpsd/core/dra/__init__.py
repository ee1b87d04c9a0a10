"""Dynamic Resource Allocation: the published form of a node's GPUs, and the requirements of an allocation on mpsd."""
