"""The server compared with its engine and with other servers."""
