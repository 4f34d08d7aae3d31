"""Admission, queues, batching and the threads of each device."""
