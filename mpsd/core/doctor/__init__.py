"""The checks of `mpsctl doctor`: each is a function of what `system/doctor` saw.

Imported by: cli, cli/commands, system/doctor.
"""
