"Masked sums and means, log-probabilities, KL estimators."
