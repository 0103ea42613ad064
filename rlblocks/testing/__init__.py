"Properties that every loss and estimator has, to check your own, and slow versions to compare with."
