"""How much of each GPU each user was granted and held, over time: what is summed, and how it is told. Pure.

Imported by: daemon/accounting, daemon/api.
"""
