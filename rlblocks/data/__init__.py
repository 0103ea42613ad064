"Batches that keep the counts of the full optimizer step when they are cut; packing, replay, datasets."
