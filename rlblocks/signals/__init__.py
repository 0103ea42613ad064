"What a policy learns from: shaped rewards, advantages, baselines of a group, corrections for stale samples."
