"""Laws that every registered compressor obeys; a new one joins by its examples."""
