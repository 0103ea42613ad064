"Rewards: functions in processes that can be killed, maths, code in a sandbox, remote models and judges."
