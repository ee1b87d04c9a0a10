"""The node: it owns the objects of the lower rooms, and decides in which order they handle a request."""
