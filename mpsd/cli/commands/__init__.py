"""The commands of `mpsctl`; `cli/group.py` imports a module when one of its commands is called."""
