"""`mpsctl top`: the live table of GPUs and clients, in Textual, which that command alone loads."""
