"""The caller's end of a lease: which process holds it, the wait for it, the program that runs with it, and its end.

Imported by: cli/commands.
"""
