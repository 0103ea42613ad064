"Policy, Critic and Scorer: loading a model, its forward pass, its output layer, LoRA, folders."
