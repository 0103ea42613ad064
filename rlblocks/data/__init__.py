"Rows: batches that remember their whole, packing and balancing, replay, datasets."
