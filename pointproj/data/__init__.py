"""From mesh files to batches: sources, preparation, cache, augmentation."""
