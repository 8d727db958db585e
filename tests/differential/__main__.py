"""``python -m tests.differential``: see the package."""

from tests.differential.run import main

if __name__ == "__main__":
    main()
