"""What kubelet speaks, as messages: the .proto files, and what protoc makes of them (`python -m tests.gate.generate`).

Imported by: kubernetes, kubernetes/dra.
"""
