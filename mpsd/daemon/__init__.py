"""The long-running process: `service` connects the rooms below and runs them; every task lives in a group."""
