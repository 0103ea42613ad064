"Benchmarks and tasks of one's own, sampled and graded, with intervals, compared with an earlier evaluation."
