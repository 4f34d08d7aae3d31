"""Distributed training in several processes."""
