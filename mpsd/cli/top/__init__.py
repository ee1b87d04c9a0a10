"""`mpsctl top`: the live table of GPUs and clients, in Textual (the extra `top`), loaded by that command alone."""
