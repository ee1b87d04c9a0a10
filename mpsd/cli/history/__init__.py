"""The events of the node for a reader: selection, sentences, and stories.

Imported by: cli/commands, cli/web.
"""
