"Rewards: functions, maths, code in a sandbox, remote models, judges."
