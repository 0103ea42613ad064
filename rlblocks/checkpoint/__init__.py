"A run that resumes: states written in shards, and converters to plain model folders."
