"""Position-wise modules, tile by tile. Imports torch and nothing of Lightning."""
