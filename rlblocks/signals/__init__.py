"Advantages, shaped rewards, group baselines, corrections for stale samples."
