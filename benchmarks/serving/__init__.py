"""The server beside its engine and beside other servers."""
