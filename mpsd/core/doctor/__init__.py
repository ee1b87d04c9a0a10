"""What `mpsctl doctor` makes of a node: checks, each a function of what mpsd/system/doctor saw. Pure."""
