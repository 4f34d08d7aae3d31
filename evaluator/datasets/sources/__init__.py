"""Sources of images: folders and archives, compressed or not."""
