"""Plain torch: the definition of every operation, and the backend that runs anywhere."""
