"""`python -m mismatch_probe`."""

from mismatch_probe.cli.app import main

if __name__ == "__main__":
    main()
