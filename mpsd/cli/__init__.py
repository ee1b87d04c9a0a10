"""`mpsctl`: a synchronous client of the API, and the rendering of its answers.

Imported by: cli/commands, cli/history, cli/leases, cli/terminal, cli/top, cli/web, kubernetes.
"""
