"A loop as a command; a loop that is watched, and its rows shown; a report; help."
