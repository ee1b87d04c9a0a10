"""`mpsctl web`: the node as a page in a browser, served on the loopback address from the caller's own process.

`page/` is what a browser gets: HTML, a style sheet and modules of JavaScript, as they stand there.

Imported by: cli/commands.
"""
