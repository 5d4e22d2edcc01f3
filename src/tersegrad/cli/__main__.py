"""``python -m tersegrad.cli``: the command line where the ``tersegrad`` script is not installed, and what torchrun's workers run."""

from tersegrad.cli import main

main()
