"""The history: the amounts that each GPU, user and lease was granted and held, sampled, stored, and thinned with age.

Imported by: daemon, daemon/api.
"""
