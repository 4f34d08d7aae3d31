"""Arrays to answers: session, batching, scores, classification, heat maps."""
