"""The API: the table of routes, what each route does, and the structs of requests and answers.

Imported by: daemon.
"""
