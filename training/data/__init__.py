"""Loading of images and labels as batches of training views."""
