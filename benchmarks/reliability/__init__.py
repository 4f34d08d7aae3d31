"""Tests of the server's promises under load and faults."""
