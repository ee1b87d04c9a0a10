"""Rules of the whole tree: layers, doors, types, lint, and documents that agree with the code."""
