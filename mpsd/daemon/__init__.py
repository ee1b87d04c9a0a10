"""The long-running process: it owns the state, and every task of it lives in a group."""
