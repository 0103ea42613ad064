"From a notebook's loop to a command."
