"""The node: it owns the parts that the rooms below make, and decides in which order a request meets them."""
