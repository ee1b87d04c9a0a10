"""What `mpsctl doctor` looks at, and what `--fix` does; `core/doctor` decides.

Imported by: cli.
"""
