"""What the front door costs, and whether it keeps its promises: HTTP, TLS, rotation."""
