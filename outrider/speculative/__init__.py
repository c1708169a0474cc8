"""Drafting, verify length and acceptance."""
