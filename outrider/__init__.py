"""Outrider: K3-architecture inference with exact DSpark speculative decoding."""

__version__ = "0.1.0"
