"""Version of the package; nothing below the command lines imports the top package for it."""

__version__ = "0.1.0"
