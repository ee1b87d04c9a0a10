"""The history: what each GPU, user and lease was granted and held, sampled, stored and thinned out with age.

Imported by: daemon, daemon/api.
"""
