"""What the server promises, tried."""
