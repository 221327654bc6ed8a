"""Run the command line: `python -m leaven`, and `torchrun ... -m leaven train`."""

from leaven.cli import main

if __name__ == "__main__":
    main()
