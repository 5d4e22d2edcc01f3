"""``python -m tersegrad``: the command line where the ``tersegrad`` script is not installed."""

from tersegrad.cli import main

main()
