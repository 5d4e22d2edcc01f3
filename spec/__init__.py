"""The wire format: ``wire.md`` defines it, ``decoder.py`` reads it independently of the package, ``vectors/`` holds examples."""
