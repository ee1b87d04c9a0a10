"""The commands of `mpsctl`; `cli/group.py` imports a module when one of its commands is called.

Imported by: cli/group.py, by name.
"""
