"""What a checkpoint holds, layer by layer."""
