"""A folder or an archive of images as labelled samples."""
