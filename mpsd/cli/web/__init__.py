"""`mpsctl web`: the node as a page in a browser, served on the loopback address from the caller's own process.

A browser gets the files of `page/` unchanged: HTML, a style sheet and modules of JavaScript.
"""
