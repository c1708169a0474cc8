"""The DSpark drafter family: configuration, weights and block inference."""
