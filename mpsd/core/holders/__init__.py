"""The holders of a lease, and their names for users. Pure."""
