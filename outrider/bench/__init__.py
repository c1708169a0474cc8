"""Measurements of a whole engine: paired A/B runs, their tables and their record."""
