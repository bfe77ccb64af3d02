"""`python -m retool_mcore` is `retool`."""

from retool_mcore.cli.main import main

if __name__ == "__main__":
    main()
