"Rows from an engine: prompts completed with their log-probs, turn by turn, now or in flight."
