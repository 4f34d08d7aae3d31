"""Decode images for a server: cheap ones in threads, all others in processes that can be killed."""
