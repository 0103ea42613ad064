"A loop of a notebook as a command."
