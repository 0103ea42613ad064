"Checks for your own losses and estimators, slow versions to compare with."
