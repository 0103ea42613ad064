"Masked sums and means, log-probabilities from logits or straight from the output layer, KL estimators."
