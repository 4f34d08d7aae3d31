"""A rehearsal of an evaluation at ImageNet's size, from three layouts, with processes that are killed."""
