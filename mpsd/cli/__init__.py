"""`mpsctl`: a synchronous client of the API, and the rendering of its answers.

Imported by: cli/commands, cli/history, cli/leases, cli/metrics, cli/terminal, cli/top, cli/web, kubernetes.
"""
