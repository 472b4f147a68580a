"""Modules of a model: find them, and patch and restore their methods."""
