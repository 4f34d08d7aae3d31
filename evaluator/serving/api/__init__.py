"""The gRPC services and the interceptor that every call passes through."""
