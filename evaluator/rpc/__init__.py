"""Code that server and client share: statuses, and conversions between messages and our types."""
