"An HTTP server that answers unchanged agents from a policy and records what they ask."
