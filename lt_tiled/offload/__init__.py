"""Block inputs in CPU memory and on disk."""
