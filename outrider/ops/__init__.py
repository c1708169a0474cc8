"""Pure tensor functions: no configuration, no caches, no state.

Every result row has the same bits alone and among other rows (see ``invariant``), and every faster
form has a plain reference next to it.
"""
