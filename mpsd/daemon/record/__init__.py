"""What mpsd decided: its log, and its events, which outlive a boot.

Imported by: every room of the daemon.
"""
