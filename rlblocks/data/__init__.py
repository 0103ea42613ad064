"`Batch`, which keeps the counts of the full step when it is cut; packing, replay, datasets."
