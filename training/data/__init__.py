"""Images and labels as batches of training views."""
