"""What is true and what to do about it: values and pure functions, without I/O, clock or log.

Imported by: every other room.
"""
