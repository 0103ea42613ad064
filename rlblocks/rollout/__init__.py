"Rows from an engine: one turn or many, at once or while you train."
