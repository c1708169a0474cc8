"""Drafting and acceptance."""
