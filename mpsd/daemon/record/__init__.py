"""The record of mpsd's decisions: its log, and its events, which outlive a boot."""
