"""Language models trained over slow links: validation loss against bytes."""
