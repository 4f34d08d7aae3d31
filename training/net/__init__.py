"""The network, its initialization and its checkpoints."""
