"""``python -m lt_tiled``."""

from lt_tiled.cli import main

if __name__ == "__main__":
    main()
