"""One file per algorithm; compressors never import one another."""
