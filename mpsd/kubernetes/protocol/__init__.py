"""kubelet's protocols: the .proto files, and the messages that protoc makes (`python -m tests.gate.generate`)."""
