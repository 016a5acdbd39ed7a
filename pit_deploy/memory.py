"""What the C library does with memory that is given back."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # malloc.h of glibc


def one_arena() -> bool:
    """Let all threads to come allocate from one arena; False where the C library is not glibc. Call it before
    libraries are imported that start threads: glibc goes by it until there are more than eight arenas.

    glibc gives threads arenas of their own, and what a finished thread leaves unused in one is not the others' to
    take: the searching export of a model of 135 million parameters peaked 0.4 GB higher. The large arrays of an
    export are so few that waiting for the one arena is not measurable.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS has no mallopt, Windows no library of that name
        return False
    return bool(mallopt(_M_ARENA_MAX, 1) == 1)
