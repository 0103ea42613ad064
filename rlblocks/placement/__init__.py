"Where wrappers live, and whether what they need fits there."
