"The laws that every loss and estimator obeys, to run on your own, and naive oracles to compare with."
