"""What the server and the client share: statuses, and conversions between messages and our types."""
