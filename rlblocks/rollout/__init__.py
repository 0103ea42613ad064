"Sampling completions with log-probs, and grading them."
