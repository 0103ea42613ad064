"pass@k, intervals, comparisons of two models, win rates, ratings, calibration, diversity: what numbers of an evaluation say."
