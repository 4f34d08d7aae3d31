"""The gRPC services, and what every call of theirs passes."""
