"""Laws that every registered compressor obeys; a new compressor joins by one line in ``cases.py``."""
