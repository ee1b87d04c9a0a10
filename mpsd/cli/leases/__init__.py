"""Parts of commands that use a lease: its holder, the wait for it, the program that runs with it, and its end."""
