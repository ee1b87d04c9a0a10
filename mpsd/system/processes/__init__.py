"""Processes: the kernel's facts about them, starting, watching and ending them, and their control groups."""
