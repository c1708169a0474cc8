"""Model families and what they share: protocols, weights, layers, the architecture report."""
