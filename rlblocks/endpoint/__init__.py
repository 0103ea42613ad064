"Agents as they are: an HTTP endpoint that speaks their protocols and records what they ask."
