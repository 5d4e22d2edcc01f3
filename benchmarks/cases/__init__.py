"""The benchmarks, one module a topic. Importing a module registers its benchmarks."""
