"""Which setting to choose: measured on small tasks, by optimiser and by bytes."""
