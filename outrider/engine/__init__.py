"""The loop that serves requests: rounds, batches, metrics, and offline use."""
