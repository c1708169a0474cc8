"""CPU operations in C++: plain functions over raw pointers, one library per instruction set, no torch headers.

Each operation of a model that exists here also exists as a torch form in ``outrider.ops``, which runs where there
is no compiler. ``library`` is the loader, ``build`` makes the libraries, ``src`` holds the sources.
"""
