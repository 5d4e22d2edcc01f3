"""Variance-based gradient compression on CIFAR-10: the published table with eight workers, in real bytes."""
