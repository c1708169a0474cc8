"""`outrider inspect`."""
