"A loop as a command."
