"""Admission, queues, batches and the thread of each device."""
