"""What is true and what to do about it: the standard library only, no I/O, no clock, no logging."""
