"""One module for each thing outside mpsd; each is the only importer of the library that reaches it."""
