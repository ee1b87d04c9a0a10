"""The events of the node for a reader: selection, sentences, and stories."""
