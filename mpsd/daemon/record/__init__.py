"""The record of mpsd's decisions: its log, its events, and the history that outlives a boot.

Imported by: every room of the daemon.
"""
