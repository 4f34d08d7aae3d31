"""Where images are read from: a folder or an archive, compressed or not."""
