"""Facts about a node and decisions about them: values and pure functions, without I/O, clock or log."""
