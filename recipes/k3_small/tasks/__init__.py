"""Deterministic generator of chat-form training tasks; the command is ``make_tasks.py`` beside this package."""
