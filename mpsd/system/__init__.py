"""One module for each thing outside mpsd; each is the only importer of the library that reaches it.

Imported by: every room of the daemon, kubernetes, and the commands `cdi`, `cluster`, `container`, `doctor` and
`service`.
"""
