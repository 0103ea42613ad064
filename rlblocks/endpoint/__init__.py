"An HTTP server that answers unchanged agents from a policy."
