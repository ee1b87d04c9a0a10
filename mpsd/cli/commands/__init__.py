"""The commands of `mpsctl`; each module is imported when one of its commands is called (mpsd/cli/group.py)."""
