"""What happened on the node, for a reader: events chosen, told as sentences, and put together as one story.

Imported by: cli/commands, cli/web.
"""
