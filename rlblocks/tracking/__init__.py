"What a run logs and where: files, trackers, seconds by phase, memory, timelines."
