"""Which processes there are, and which one this is. May import `backend`."""

import jax

__all__ = ["process_count", "process_index"]


def process_count() -> int:
    """How many processes form one computation; 1 unless they were joined."""
    return jax.process_count()


def process_index() -> int:
    """This process's number among them, from 0."""
    return jax.process_index()
