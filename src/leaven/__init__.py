"""leaven: tune a little model, train the big one."""

__version__ = "0.1.0"
