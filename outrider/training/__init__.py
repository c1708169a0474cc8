"""Training forms: differentiable batched K3 and DSpark, losses, optimiser, data."""
